"""Every pair of features, in float32: greedy output is Hugging Face's, sampled output that of the plain engine, and
beams are Hugging Face's, whatever else is on."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.exactness.conftest import Features
from tests.runtime.exactness.speculators import METHODS, speculative_config

from kvasir_runtime.engine.messages import BeamSearch

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
NUM_BEAM_TOKENS = 40


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="session")
def plain_answers() -> dict[str, Any]:
    """Sampled sequences and beams of the plain engine, by architecture."""
    return {}


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
    pair: tuple[str, str], reference: Any, start_engine: Any, heads: Path, plain_answers: dict[str, Any]
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
    for index in (0, 2, 4, 5):
        engine.add(f"greedy-{index}", expected.prompts[index], expected.outputs[index][:cut])
    if "several" in pair:
        engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
    if "beams" in pair:
        engine.add("beams", expected.prompts[3], seeds=range(WIDTH), beam=BeamSearch(width=WIDTH), max_tokens=40)
    names = [f"greedy-{index}" for index in (0, 2, 4, 5)]
    names += names_of("several", len(SEEDS)) if "several" in pair else []
    names += names_of("beams", WIDTH) if "beams" in pair else []
    generated = engine.finish(*names)

    for index in (0, 2, 4, 5):
        assert generated.token_ids(f"greedy-{index}") == expected.outputs[index][cut:]
    if "several" in pair:
        assert [generated.token_ids(name) for name in names_of("several", len(SEEDS))] == sampled
        assert all(len(generated.logprobs(n)) == len(s) for n, s in zip(names_of("several", 3), sampled, strict=True))
    if "beams" in pair:
        assert [generated.token_ids(name) for name in names_of("beams", WIDTH)] == beams
    stats = generated.stats
    assert (stats.num_preemptions > 0) == ("few_blocks" in pair)
    if method == "draft_model" and "windows" not in pair:
        assert stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens, "a draft that is the target is right"
    if method in ("medusa", "eagle", "eagle3"):
        assert stats.num_draft_tokens > stats.num_accepted_tokens
