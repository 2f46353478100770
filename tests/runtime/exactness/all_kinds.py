"""Requests that between them use all that an engine does with a sequence, and what must come of them on any ranks:
greedy ones that share a prefix, one that another engine has begun, several samples with penalties and stop tokens, and
beams; log-probabilities of what is generated and of a prompt."""

from typing import Any

import pytest
from tests.runtime.exactness.conftest import Engine, Generated

from kvasir_runtime.requests.sampling_params import BeamSearch

GREEDY = (0, 2, 4, 5)
RESUMED, NUM_DONE = 1, 20
SEEDS = (11, 12, 13)
SAMPLING: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 20,
    "stop_token_ids": tuple(range(60)), "logprobs": 1,
}  # fmt: skip
NAMES = [
    *(f"greedy-{index}" for index in GREEDY), "resumed", "several", "several.1", "several.2", "beams", "beams.1"
]  # fmt: skip


def run_all_kinds(engine: Engine, expected: Any) -> Generated:
    for index in GREEDY:
        engine.add(f"greedy-{index}", expected.prompts[index], logprobs=2, prompt_logprobs=1 if index == 2 else None)
    engine.add("resumed", expected.prompts[RESUMED], expected.outputs[RESUMED][:NUM_DONE])
    engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
    engine.add("beams", expected.prompts[3], seeds=range(2), beam=BeamSearch(width=2), max_tokens=40)
    return engine.finish(*NAMES)


def check_all_kinds(generated: Generated, alone: Generated, expected: Any) -> None:
    """`alone`: what one rank gave."""
    for index in GREEDY:
        assert generated.token_ids(f"greedy-{index}") == expected.outputs[index]
    assert generated.token_ids("resumed") == expected.outputs[RESUMED][NUM_DONE:]
    assert {name: generated.token_ids(name) for name in NAMES} == {name: alone.token_ids(name) for name in NAMES}
    for entry, alone_entry in zip(generated.logprobs("several.1"), alone.logprobs("several.1"), strict=True):
        assert entry.logprobs == pytest.approx(alone_entry.logprobs, abs=1e-4)
    scores, alone_scores = (of.outputs["greedy-2"][0].prompt_logprobs for of in (generated, alone))
    assert len(scores) == len(alone_scores) == len(expected.prompts[2])
    for entry, alone_entry in zip(scores[1:], alone_scores[1:], strict=True):
        assert entry.logprobs == pytest.approx(alone_entry.logprobs, abs=1e-4)
