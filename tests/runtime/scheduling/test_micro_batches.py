"""Planning for pipeline stages: even micro-batches that hold different sequences, and word of what was drawn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.runtime.scheduling.fake_rank import continuation
from tests.runtime.scheduling.rows_by_hand import occupy

from kvasir_runtime.scheduling.planner import micro_batch
from kvasir_runtime.scheduling.running_rows import RunningRows

MakeEngine = Callable[..., Any]


def decodes_of(plan: Any) -> set[int]:
    return set(plan.rows[: plan.num_decodes].tolist())


@pytest.mark.parametrize(
    ("num_rows", "awaited", "num_stages", "taken"),
    [
        (6, [], 2, [0, 1, 2]),
        (6, [0, 1, 2], 2, [3, 4, 5]),
        (7, [], 2, [0, 1, 2, 3]),
        (7, [0, 1, 2, 3], 2, [4, 5, 6]),
        (7, [], 3, [0, 1, 2]),
        (1, [], 4, [0]),
        (1, [0], 4, []),
        (0, [], 2, []),
        (5, [1, 3], 1, [0, 2, 4]),
    ],
)
def test_a_step_takes_an_even_part(num_rows: int, awaited: list[int], num_stages: int, taken: list[int]) -> None:
    rows = np.arange(num_rows) + 10
    assert micro_batch(rows, np.isin(np.arange(num_rows), awaited), num_stages).tolist() == [10 + row for row in taken]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_under_way_decode_different_sequences_evenly(num_stages: int, make_engine: MakeEngine) -> None:
    engine = make_engine(num_stages=num_stages)
    for first in range(6):
        engine.add([first, 1, 2], max_tokens=20)
    for _ in range(3 * num_stages):
        engine.step()
    for _ in range(10):
        engine.step()
        plans = [plan for plan, _ in engine.under_way]
        assert [plan.num_decodes for plan in plans] == [6 // num_stages] * (num_stages - 1)
        assert len(set().union(*map(decodes_of, plans))) == 6 - 6 // num_stages


def test_chunks_of_a_prompt_follow_each_other_through_the_stages(make_engine: MakeEngine) -> None:
    engine = make_engine(num_stages=3, budget=8)
    engine.add([7] * 24, max_tokens=2)
    plans = [engine.scheduler.schedule() for _ in range(3)]
    assert [(plan.starts.tolist(), plan.num_tokens) for plan in plans] == [([0], 8), ([8], 8), ([16], 8)]
    assert engine.scheduler.schedule() is None, "its first token is not known"


def test_plans_bring_earlier_stages_what_was_drawn(make_engine: MakeEngine) -> None:
    engine = make_engine(num_stages=2)
    engine.add([5, 6, 7], max_tokens=4)
    drawn = continuation([5, 6, 7], 2)
    plans = [engine.step() for _ in range(8)]
    sent = [plan.returned.token_writes.tolist() for plan in plans if plan is not None]
    row = int(plans[0].rows[0])
    assert sent[:3] == [[], [[row, 3, drawn[0]]], [[row, 4, drawn[1]]]]


def test_drafts_are_returned_with_the_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(num_stages=2, drafts=2)
    engine.rank.tells_drafts = True
    engine.add([5, 6, 7], max_tokens=9)
    drawn = continuation([5, 6, 7], 9)
    plans = [plan for plan in (engine.step() for _ in range(6)) if plan is not None]
    assert plans[1].returned.drafts.tolist() == [drawn[1:3]]
    assert [token for _, _, token in plans[2].returned.token_writes.tolist()] == drawn[1:4]
    assert plans[2].returned.drafts.tolist() == [drawn[4:6]]


@pytest.mark.parametrize(("lengths", "drafts"), [([3, 1], [[7, 8], [5, -1]]), ([1, 2], [[7], [5]]), ([1, 1], [[], []])])
def test_as_many_drafts_are_returned_as_any_decode_verifies(lengths: list[int], drafts: list[list[int]]) -> None:
    state = RunningRows(2, 32, num_stages=2, max_drafts=3)
    rows = np.array([occupy(state), occupy(state)])
    state.drafts[rows] = [[7, 8, 9], [5, -1, -1]]
    assert state.take_returned(rows, np.array(lengths)).drafts.tolist() == drafts


def test_one_stage_plans_as_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(ahead=1)
    engine.add([5, 6, 7], max_tokens=9)
    plans = [engine.step() for _ in range(4)]
    assert all(plan is not None and plan.returned is None for plan in plans)
    assert [decodes_of(plan) for plan in plans] == [set(), {0}, {0}, {0}]


def test_plans_say_how_many_steps_have_failed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_stages=2)
    for first in range(4):
        engine.add([first, 1, 2], max_tokens=9)
    assert engine.step().num_failures == 0
    engine.fail()
    engine.add([9, 1, 2], max_tokens=9)
    assert engine.step().num_failures == 1
