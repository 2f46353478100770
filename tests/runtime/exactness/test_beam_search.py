"""Beam search finds the hypotheses that Hugging Face's finds, best first."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.runtime.crossed import crossed
from tests.runtime.exactness.conftest import DTYPES, Dtype, Features

from kvasir_runtime.requests.sampling_params import BeamSearch

NUM_TOKENS = 24

ADJUSTMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "min_tokens": ({"min_tokens": 12}, {"min_new_tokens": 12}),
    "logit_bias": ({"logit_bias": {7: 4.0, 9: -3.0}}, {"sequence_bias": [[[7], 4.0], [[9], -3.0]]}),
}


@functools.cache
def model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hugging_face_beams(
    folder: Path, prompt: list[int], width: int, num_tokens: int, eos: int | None, **options: Any
) -> list[list[int]]:
    with torch.inference_mode():
        found = model_of(folder).generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), num_beams=width,
            num_return_sequences=width, max_new_tokens=num_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0,
            **options,
        )  # fmt: skip
    return [cut(line[len(prompt) :].tolist(), eos) for line in found]


def cut(tokens: list[int], eos: int | None) -> list[int]:
    """Up to the end of the sequence; Hugging Face pads behind it."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def beams_of(engine: Any, name: str, width: int) -> list[list[int]]:
    names = [name, *(f"{name}.{index}" for index in range(1, width))]
    generated = engine.finish(*names)
    return [generated.token_ids(name) for name in names]


# Of one beam Hugging Face makes a greedy search, which ends at a stop token whatever longer hypotheses may be worth.
STOPPING = [
    one for one in crossed([1, 2, 4], [False, True, "never"], [1.0, 2.0, -1.0]) if one.values[:2] != (1, "never")
]


@pytest.mark.parametrize(("width", "early_stopping", "length_penalty"), STOPPING)
def test_equal_to_hugging_face(
    width: int, early_stopping: Any, length_penalty: float, reference: Any, start_engine: Any
) -> None:
    expected = reference("LlamaForCausalLM")
    engine = start_engine(expected.folder)
    options: dict[str, Any] = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    prompts = expected.prompts
    ends = [hugging_face_beams(expected.folder, prompt, width, NUM_TOKENS, None)[0][9] for prompt in prompts]
    for number, (prompt, eos) in enumerate(zip(prompts, ends, strict=True)):
        engine.add(
            str(number), prompt, seeds=range(width), beam=BeamSearch(width=width, **options), max_tokens=NUM_TOKENS,
            stop_token_ids=(eos,),
        )  # fmt: skip
    lengths = set()
    for number, (prompt, eos) in enumerate(zip(prompts, ends, strict=True)):
        found = beams_of(engine, str(number), width)
        assert found == hugging_face_beams(expected.folder, prompt, width, NUM_TOKENS, eos, **options)
        lengths |= {len(tokens) for tokens in found}
    assert min(lengths) < NUM_TOKENS or early_stopping == "never" or length_penalty == 2.0, (
        "some hypothesis ended at a stop token"
    )


@pytest.mark.parametrize("name", ADJUSTMENTS)
def test_adjusted_probabilities_are_summed_up_as_hugging_face_sums_them(
    name: str, reference: Any, start_engine: Any
) -> None:
    """What is left after an adjustment is not made to sum to one again."""
    expected = reference("LlamaForCausalLM")
    engine = start_engine(expected.folder)
    own, theirs = ADJUSTMENTS[name]
    prompt = expected.prompts[2]
    eos = hugging_face_beams(expected.folder, prompt, 3, 24, None)[0][4]
    engine.add(
        "beams", prompt, seeds=range(3), beam=BeamSearch(width=3), max_tokens=24, stop_token_ids=(eos,), **own
    )  # fmt: skip
    assert beams_of(engine, "beams", 3) == hugging_face_beams(expected.folder, prompt, 3, 24, eos, **theirs)


FEATURES = ["chunked", "prefix_cache", "few_blocks", "one_step_ahead", "three_steps_ahead"]


@pytest.fixture(scope="module")
def beams_alone() -> dict[Path, list[list[int]]]:
    """What a model's plain engine finds while it serves nothing else, once it has been asked."""
    return {}


@pytest.mark.parametrize(("architecture", "dtype", "feature"), crossed(["Llama", "Gemma3"], DTYPES, FEATURES))
def test_a_beam_search_beside_other_requests(
    architecture: str,
    dtype: Dtype,
    feature: str,
    reference: Any,
    start_engine: Any,
    beams_alone: dict[Path, list[list[int]]],
) -> None:
    expected = reference(f"{architecture}ForCausalLM", dtype)
    if dtype == "float32":
        beams_alone[expected.folder] = hugging_face_beams(expected.folder, expected.prompts[2], 3, 30, None)
    elif expected.folder not in beams_alone:
        alone = start_engine(expected.folder)
        alone.add("beams", expected.prompts[2], seeds=range(3), beam=BeamSearch(width=3), max_tokens=30)
        beams_alone[expected.folder] = beams_of(alone, "beams", 3)
    engine = start_engine(expected.folder, Features(**{feature: True}))
    for index in (0, 1, 4):
        engine.add(f"greedy-{index}", expected.prompts[index])
    engine.add("beams", expected.prompts[2], seeds=range(3), beam=BeamSearch(width=3), max_tokens=30)
    engine.add("late", expected.prompts[5])
    assert beams_of(engine, "beams", 3) == beams_alone[expected.folder]
    generated = engine.finish("late", *(f"greedy-{index}" for index in (0, 1, 4)))
    for index in (0, 1, 4):
        assert generated.token_ids(f"greedy-{index}") == expected.outputs[index]
    assert generated.token_ids("late") == expected.outputs[5]
