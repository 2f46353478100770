"""Every pair of features, in float32: greedy output is Hugging Face's, sampled output that of the plain engine, and
beams are Hugging Face's, whatever else is on."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.conftest import NUM_NEW_TOKENS, SMALLEST_MARGIN, Features
from tests.runtime.exactness.speculators import METHODS, speculative_config
from transformers import AutoModelForCausalLM

from kvasir_runtime.requests.sampling_params import BeamSearch

SWITCHES = ("prefix_cache", "chunked", "few_blocks")
AHEAD = ("one_step_ahead", "three_steps_ahead")
REQUESTS = ("resumed", "several", "beams")
FEATURES = (*SWITCHES, *AHEAD, *REQUESTS, "windows", *METHODS)
PAIRS = [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if not set(pair) <= set(METHODS) and not set(pair) <= set(AHEAD)
]
SAMPLING: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 20,
    "stop_token_ids": tuple(range(60)), "logprobs": 1,
}  # fmt: skip
SEEDS = (11, 12, 13)
WIDTH = 2
STEPS_AHEAD = {"one_step_ahead": 1, "three_steps_ahead": 3}
LOOKUPS = ("ngram", "suffix")


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="session")
def plain_answers() -> dict[str, Any]:
    """Sampled sequences and beams of the plain engine, by architecture."""
    return {}


@pytest.fixture(scope="session")
def repetitive(reference: Any) -> Callable[[str], tuple[list[int], list[int]]]:
    """A prompt of an architecture that says three tokens again and again, and Hugging Face's greedy output, which then
    repeats itself too: so that looking up what came before finds something, and sometimes the right thing."""

    @functools.cache
    @torch.inference_mode()
    def of(architecture: str) -> tuple[list[int], list[int]]:
        model = AutoModelForCausalLM.from_pretrained(reference(architecture).folder).eval()
        prompts = torch.randint(320, (48, 3), generator=torch.Generator().manual_seed(4)).repeat(1, 8)
        mask, length = torch.ones_like(prompts), prompts.shape[1]
        tokens = model.generate(prompts, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        best = model(tokens).logits[:, length - 1 :].topk(2).values
        is_clear = (best[..., 0] - best[..., 1]).amin(1) > SMALLEST_MARGIN
        chosen = min(tokens[is_clear].tolist(), key=lambda row: len(set(row[length:])))
        return chosen[:length], chosen[length:]

    return of


def names_of(request: str, number: int) -> list[str]:
    return [request, *(f"{request}.{index}" for index in range(1, number))]


def answers(engine: Any, expected: Any) -> tuple[list[list[int]], list[list[int]]]:
    """(sampled sequences of one prompt, beams of another)."""
    engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
    engine.add("beams", expected.prompts[3], seeds=range(WIDTH), beam=BeamSearch(width=WIDTH), max_tokens=40)
    sampled, beams = names_of("several", len(SEEDS)), names_of("beams", WIDTH)
    generated = engine.finish(*sampled, *beams)
    return [generated.token_ids(name) for name in sampled], [generated.token_ids(name) for name in beams]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_features_at_once_change_nothing(
    pair: tuple[str, str],
    reference: Any,
    repetitive: Any,
    start_engine: Any,
    heads: Path,
    plain_answers: dict[str, Any],
) -> None:
    architecture = "Gemma3" if "windows" in pair else "Llama"
    expected = reference(f"{architecture}ForCausalLM")
    if architecture not in plain_answers:
        plain_answers[architecture] = answers(start_engine(expected.folder), expected)
    sampled, beams = plain_answers[architecture]
    features = Features(**{name: True for name in pair if name in (*SWITCHES, *AHEAD)})
    method = next((name for name in pair if name in METHODS), None)
    options = {}
    if method is not None:
        draft = reference("LlamaForCausalLM").folder  # the target itself, where that has no windows
        options["speculative_config"] = speculative_config(method, expected.folder, draft, heads / architecture)
    engine = start_engine(expected.folder, features, **options)

    cut = 17 if "resumed" in pair else 0
    greedy = {f"greedy-{index}": (expected.prompts[index], expected.outputs[index]) for index in (0, 2, 4, 5)}
    if method in LOOKUPS:
        greedy["repetitive"] = repetitive(f"{architecture}ForCausalLM")
    for name, (prompt, output) in greedy.items():
        engine.add(name, prompt, output[:cut])
    names = list(greedy)
    if "resumed" in pair:
        engine.add("sampled", expected.prompts[4], sampled[0][:cut], seeds=SEEDS[:1], **SAMPLING)
        names.append("sampled")
    if "several" in pair:
        engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
        names += names_of("several", len(SEEDS))
    if "beams" in pair:
        engine.add("beams", expected.prompts[3], seeds=range(WIDTH), beam=BeamSearch(width=WIDTH), max_tokens=40)
        names += names_of("beams", WIDTH)
    generated = engine.finish(*names)
    if "prefix_cache" in pair:  # what is asked at once is computed at once
        engine.add("again", expected.prompts[5])
        generated = engine.finish("again")
        assert generated.token_ids("again") == expected.outputs[5]

    for name, (_, output) in greedy.items():
        assert generated.token_ids(name) == output[cut:]
    if "resumed" in pair:
        assert generated.token_ids("sampled") == sampled[0][cut:]
    if "several" in pair:
        assert [generated.token_ids(name) for name in names_of("several", len(SEEDS))] == sampled
        assert all(len(generated.logprobs(n)) == len(s) for n, s in zip(names_of("several", 3), sampled, strict=True))
    if "beams" in pair:
        assert [generated.token_ids(name) for name in names_of("beams", WIDTH)] == beams
    assert engine.most_steps_ahead == next((STEPS_AHEAD[name] for name in pair if name in AHEAD), 0)
    stats = generated.stats
    assert (stats.num_preemptions > 0) == ("few_blocks" in pair)
    assert (stats.num_prefix_hits > 0) == ("prefix_cache" in pair)
    assert (stats.num_draft_tokens > 0) == (method is not None)
    if method in LOOKUPS:
        assert stats.num_accepted_tokens > 0
    if method == "draft_model" and "windows" not in pair:
        assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens, "a draft that is the target is right"
    if method in ("medusa", "eagle", "eagle3"):
        assert stats.num_draft_tokens > stats.num_accepted_tokens
