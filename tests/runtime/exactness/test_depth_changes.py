"""Depth that comes and goes: proposers miss steps, prompts and cached blocks, and the tokens are the same."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.crossed import crossed
from tests.runtime.exactness.conftest import DTYPES, Dtype, EngineFactory, Features, Reference
from tests.runtime.exactness.speculators import METHODS, NUM_DRAFTS, speculative_config
from tests.runtime.watched_platform import WatchedPlatform

from kvasir_runtime.speculative.depth import Depths, FixedDepth, IntArray

FEATURES = (Features(prefix_cache=True, chunked=True), Features(few_blocks=True, one_step_ahead=True))
SAMPLING: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.2}
SEEDS = (11, 12, 13)
SCORED = (2, 5)
"""Of which log-probabilities are asked for."""


class ChangingDepth(FixedDepth):
    """For a few calls all drafts, for a few none, then some for every other row."""

    def __init__(self) -> None:
        super().__init__(NUM_DRAFTS)
        object.__setattr__(self, "calls", iter(range(10_000)))

    def depths(self, rows: IntArray) -> Depths:
        phase = next(self.calls) % 17
        if phase < 7:
            return np.zeros(len(rows), dtype=np.int64)
        return super().depths(rows) if phase < 13 else np.where(rows % 2, 2, 0)


@pytest.mark.parametrize(
    ("method", "features", "dtype"),
    crossed(
        [pytest.param(name, id=name) for name in METHODS],
        [pytest.param(FEATURES[0], id="cached"), pytest.param(FEATURES[1], id="preempted")],
        [pytest.param(name, id=name) for name in DTYPES],
    ),
)
def test_depth_that_comes_and_goes_changes_no_token(
    method: str, features: Features, dtype: Dtype, reference: Any, start_engine: Any, tmp_path: Path
) -> None:
    assert_no_token_changes(method, features, reference("LlamaForCausalLM", dtype), start_engine, tmp_path)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
@pytest.mark.parametrize("features", FEATURES, ids=["cached", "preempted"])
def test_nor_does_it_where_drafts_are_made_without_waiting(
    method: str, features: Features, reference: Any, start_engine: Any, tmp_path: Path
) -> None:
    """As on CUDA."""
    start = partial(start_engine, platform=WatchedPlatform(never_waits=True))
    assert_no_token_changes(method, features, reference("LlamaForCausalLM", "bfloat16"), start, tmp_path)


def assert_no_token_changes(
    method: str, features: Features, expected: Reference, start_engine: EngineFactory, tmp_path: Path
) -> None:
    plain = start_engine(expected.folder)
    plain.add("several", expected.prompts[3], seeds=SEEDS, **SAMPLING)
    names = ["several", *(f"several.{index}" for index in range(1, len(SEEDS)))]
    sampled = plain.finish(*names)
    config = speculative_config(method, expected.folder, expected.folder, tmp_path)
    engine = start_engine(expected.folder, features, depth=ChangingDepth(), speculative_config=config)
    engine.add("several", expected.prompts[3], seeds=SEEDS, **SAMPLING)
    for index in (0, 2, 4, 5):  # the last two share a prefix
        engine.add(f"greedy-{index}", expected.prompts[index], logprobs=1 if index in SCORED else None)
    generated = engine.finish(*names, *(f"greedy-{index}" for index in (0, 2, 4, 5)))
    for index in (0, 2, 4, 5):
        expected.check(generated, f"greedy-{index}", index)
    assert [generated.token_ids(name) for name in names] == [sampled.token_ids(name) for name in names]
    assert generated.stats.num_drafts or method in ("ngram", "suffix")


@pytest.mark.parametrize("features", FEATURES, ids=["cached", "preempted"])
def test_a_draft_that_is_the_target_stays_right_whatever_it_has_missed(
    features: Features, reference: Any, start_engine: Any, tmp_path: Path
) -> None:
    assert_all_drafts_hold(features, reference("LlamaForCausalLM", "bfloat16"), start_engine, tmp_path)


@pytest.mark.parametrize("features", FEATURES, ids=["cached", "preempted"])
def test_it_stays_right_where_drafts_are_made_without_waiting(
    features: Features, reference: Any, start_engine: Any, tmp_path: Path
) -> None:
    start = partial(start_engine, platform=WatchedPlatform(never_waits=True))
    assert_all_drafts_hold(features, reference("LlamaForCausalLM", "bfloat16"), start, tmp_path)


def assert_all_drafts_hold(
    features: Features, expected: Reference, start_engine: EngineFactory, tmp_path: Path
) -> None:
    config = speculative_config("draft_model", expected.folder, expected.folder, tmp_path)
    engine = start_engine(expected.folder, features, depth=ChangingDepth(), speculative_config=config)
    for index in range(6):
        engine.add(f"greedy-{index}", expected.prompts[index])
    stats = engine.finish(*(f"greedy-{index}" for index in range(6))).stats
    assert stats.num_draft_tokens > 50
    assert stats.num_accepted_tokens == stats.num_draft_tokens
