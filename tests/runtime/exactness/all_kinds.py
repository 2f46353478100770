"""Requests that between them use all that an engine does with a sequence, and what must come of them on any ranks:
greedy ones that share a prefix, one that another engine has begun, several samples with penalties and stop tokens,
samples that follow a grammar, and beams; log-probabilities of what is generated and of a prompt."""

import re
from typing import Any

import pytest
from tests.runtime.exactness.conftest import TOLERANCES, Dtype, Engine, Generated, Reference

from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.structured.grammars import regex_grammar

GREEDY = (0, 2, 4, 5)
RESUMED, NUM_DONE = 1, 20
SEEDS = (11, 12, 13)
SAMPLING: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 20,
    "stop_token_ids": tuple(range(60)), "logprobs": 1,
}  # fmt: skip
WORDS = re.compile("(ab|ba|10){4,20}")
END = 300
"""A special token."""
HELD_SEEDS = (21, 22)
HELD: dict[str, Any] = {
    "grammar": regex_grammar(WORDS.pattern), "max_tokens": 80, "stop_token_ids": (END,), "temperature": 0.9,
    "repetition_penalty": 1.3, "min_tokens": 30, "logprobs": 1,
}  # fmt: skip
NAMES = [
    *(f"greedy-{index}" for index in GREEDY), "resumed", "several", "several.1", "several.2", "held", "held.1", "beams",
    "beams.1",
]  # fmt: skip


def run_all_kinds(engine: Engine, expected: Reference, *, one_by_one: bool = False) -> Generated:
    def added(*names: str) -> None:
        if one_by_one:
            engine.finish(*names)

    for index in GREEDY:
        engine.add(f"greedy-{index}", expected.prompts[index], logprobs=2, prompt_logprobs=1 if index == 2 else None)
        added(f"greedy-{index}")
    engine.add("resumed", expected.prompts[RESUMED], expected.outputs[RESUMED][:NUM_DONE])
    added("resumed")
    engine.add("several", expected.prompts[4], seeds=SEEDS, **SAMPLING)
    added("several", "several.1", "several.2")
    engine.add("held", expected.prompts[1], seeds=HELD_SEEDS, **HELD)
    added("held", "held.1")
    engine.add("beams", expected.prompts[3], seeds=range(2), beam=BeamSearch(width=2), max_tokens=40)
    return engine.finish(*NAMES)


def check_all_kinds(generated: Generated, alone: Generated, dtype: Dtype) -> None:
    """`alone`: what the plain engine gave."""
    assert {name: generated.token_ids(name) for name in NAMES} == {name: alone.token_ids(name) for name in NAMES}
    for name in ("greedy-0", "greedy-5", "several.1"):
        check_logprobs(generated.logprobs(name), alone.logprobs(name), dtype)
    scores, alone_scores = (of.outputs["greedy-2"][0].prompt_logprobs for of in (generated, alone))
    check_logprobs(scores[1:], alone_scores[1:], dtype)  # none of the first


def check_logprobs(found: list[TokenLogprobs], own: list[TokenLogprobs], dtype: Dtype) -> None:
    assert found
    for entry, own_entry in zip(found, own, strict=True):
        assert entry.logprobs == pytest.approx(own_entry.logprobs, abs=TOLERANCES[dtype], rel=0)


def check_greedy(generated: Generated, expected: Reference) -> None:
    for index in GREEDY:
        expected.check(generated, f"greedy-{index}", index)
    assert generated.token_ids("resumed") == expected.outputs[RESUMED][NUM_DONE:]
