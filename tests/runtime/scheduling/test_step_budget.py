"""A step's prompts are cut by time while anybody decodes."""

from dataclasses import replace

import pytest

from kvasir_runtime.scheduling.step import UNMEASURED_TOKENS, StepBudget, TimedStep

MOST, BLOCK = 2048, 16
MANY = 100_000
"""Tokens of prompts left to compute."""
STEP = TimedStep(
    num_decodes=0, num_prompt_tokens=0, num_asked=0, num_accepted=0, num_proposals=0, seconds=99.0, clock_seconds=0.0,
)  # fmt: skip


class Machine:
    """A step takes so long for its decodes, and for each token of a prompt."""

    def __init__(self, budget: StepBudget, decode_seconds: float, token_seconds: float) -> None:
        self.budget = budget
        self.decode_seconds = decode_seconds
        self.token_seconds = token_seconds

    def step(self, num_decodes: int, num_prompt_tokens: int) -> float:
        seconds = self.decode_seconds * bool(num_decodes) + self.token_seconds * num_prompt_tokens
        self.budget.observe_step(
            replace(STEP, num_decodes=num_decodes, num_prompt_tokens=num_prompt_tokens, clock_seconds=seconds)
        )
        return seconds

    def mixed_steps(self, number: int, num_decodes: int = 1) -> list[float]:
        """Seconds of each, with chunks as large as they may be."""
        return [self.step(num_decodes, self.budget.num_prompt_tokens(num_decodes, 1, MANY)) for _ in range(number)]


@pytest.fixture
def budget() -> StepBudget:
    return StepBudget(MOST, 0.1, BLOCK)


def test_a_prompt_that_nobody_decodes_beside_has_the_whole_budget(budget: StepBudget) -> None:
    Machine(budget, 0.01, 0.01).mixed_steps(5)
    assert budget.num_prompt_tokens(0, 1, MANY) == MOST


def test_the_first_chunk_beside_a_stream_is_small_where_nothing_was_measured(budget: StepBudget) -> None:
    assert budget.num_prompt_tokens(1, 1, MANY) == UNMEASURED_TOKENS


@pytest.mark.parametrize("token_seconds", [0.0001, 0.0002, 0.001])
def test_steps_with_prompts_take_the_time_aimed_at(budget: StepBudget, token_seconds: float) -> None:
    machine = Machine(budget, 0.005, token_seconds)
    machine.step(1, 0)
    machine.step(0, MOST)
    assert all(0.1 - BLOCK * token_seconds <= seconds <= 0.1 for seconds in machine.mixed_steps(5))


def test_chunks_are_whole_blocks_and_no_more_than_the_budget(budget: StepBudget) -> None:
    machine = Machine(budget, 0.0, 0.1 / 1000)
    machine.step(0, MOST)
    assert budget.num_prompt_tokens(1, 1, MANY) == 992
    machine = Machine(budget, 0.0, 1e-6)
    for _ in range(20):
        machine.step(0, 10 * MOST)
    assert budget.num_prompt_tokens(1, 1, MANY) == MOST


@pytest.mark.parametrize(
    ("num_prompts", "num_left", "num_tokens"),
    [(3, 2000, 2000), (3, 2001, 992), (3, 1001, 1001), (3, 999, 992), (2, 2000, 992)],
)
def test_a_step_may_take_twice_as_long_where_that_ends_the_wait_of_more_than_decode(
    budget: StepBudget, num_prompts: int, num_left: int, num_tokens: int
) -> None:
    Machine(budget, 0.0, 0.1 / 1000).step(0, MOST)
    assert budget.num_prompt_tokens(2, num_prompts, num_left) == num_tokens


def test_a_prompt_goes_on_however_slow_the_machine_is(budget: StepBudget) -> None:
    machine = Machine(budget, 0.0, 1.0)
    machine.step(0, MOST)
    assert budget.num_prompt_tokens(1, 1, MANY) == BLOCK


def test_where_decodes_alone_take_long_prompts_get_twice_as_much(budget: StepBudget) -> None:
    machine = Machine(budget, 0.2, 0.001)
    for _ in range(3):
        machine.step(1, 0)
    assert machine.mixed_steps(8)[-1] == pytest.approx(0.6, abs=BLOCK * 0.001)


def test_follows_a_machine_that_gets_slower(budget: StepBudget) -> None:
    machine = Machine(budget, 0.005, 0.0001)
    machine.step(1, 0)
    machine.mixed_steps(20)
    machine.token_seconds *= 3
    assert machine.mixed_steps(30)[-1] < 0.12


def test_what_few_decodes_took_says_nothing_of_many(budget: StepBudget) -> None:
    machine = Machine(budget, 0.2, 0.001)
    machine.step(64, 0)
    machine.step(0, MOST)
    assert budget.num_prompt_tokens(1, 1, MANY) == 96
    assert budget.num_prompt_tokens(64, 1, MANY) == 400


def test_steps_that_warm_up_are_not_counted(budget: StepBudget) -> None:
    budget.observe_step(replace(STEP, num_prompt_tokens=MOST, clock_seconds=9.0, is_warming_up=True))
    assert budget.num_prompt_tokens(1, 1, MANY) == UNMEASURED_TOKENS


def test_the_planner_cuts_prompts_beside_a_stream_and_no_others(make_engine) -> None:
    budget = StepBudget(60, 0.1, 4)
    budget.observe_step(replace(STEP, num_prompt_tokens=100, clock_seconds=1.0))  # 8 tokens in 0.1 seconds
    engine = make_engine(budget=60, step_budget=budget)
    engine.add([1] * 30, max_tokens=20)
    assert engine.step().num_new_tokens.tolist() == [30]
    engine.add([2] * 20, max_tokens=2)
    plans = [engine.step() for _ in range(5)]
    assert [plan.num_new_tokens.tolist() for plan in plans] == [[1, 8], [1, 8], [1, 4], [1, 1], [1]]
    engine.add([3] * 7, max_tokens=1)
    engine.add([4] * 8, max_tokens=1)
    assert engine.step().num_new_tokens.tolist() == [1, 7, 8]
