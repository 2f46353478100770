"""What whoever knows the trace beforehand would need: how much is left for any rule to save.

Plans the replicas of each half minute by dynamic programming over a queue of the trace's prefills, then runs the plan
through the simulation like a rule. Its threshold is a price, in replica-seconds: what it pays to have one more request
begin in time. The plan is the cheapest for that queue, in which nothing is cached and answers take of an engine's time
what they take on average: it shows that so few replica-hours do, not that fewer never would.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import ceil
from statistics import fmean

from benchmarks.autoscaling.simulation import Setting
from benchmarks.autoscaling.view import FleetView
from benchmarks.routing.engine import EngineModel
from benchmarks.routing.trace import Trace

ORACLE = "oracle"
PRICES = (0.5, 0.6, 0.7, 1.0, 2.0, 5.0, 20.0, 100.0)
BIN_SECONDS = 30.0
MOST_REPLICAS = 12
_BACKLOG_STEPS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Seconds of prefill a replica: of plans between the same two, with as many replicas, the cheapest goes on."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    arrived: float
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """`numbers`: of replicas, by bin; `free_at`: when each has worked off what it was sent, ascending."""

    numbers: tuple[int, ...]
    free_at: tuple[float, ...]
    cost: float = 0.0


class Planned:
    """`numbers`: replicas that are to serve, by half minute, each asked for as long before as it takes to start."""

    interval_seconds = BIN_SECONDS

    def __init__(self, numbers: Sequence[int], startup_seconds: float) -> None:
        self._numbers = numbers
        self._num_ahead = ceil(startup_seconds / BIN_SECONDS)

    def wanted(self, views: Mapping[str, FleetView]) -> Mapping[str, int]:
        return {role: self._wanted(view.now) for role, view in views.items()}

    def _wanted(self, now: float) -> int:
        first = min(round(now / BIN_SECONDS), len(self._numbers) - 1)
        return max(self._numbers[first : first + self._num_ahead + 1])


def oracle(trace: Trace, price: float, setting: Setting) -> Planned:
    return Planned(plan(trace, price, setting), setting.startup_seconds)


def plan(trace: Trace, price: float, setting: Setting) -> tuple[int, ...]:
    """Replicas by half minute that cost least: their seconds, starts and ends, and `price` for each late request."""
    model = setting.model
    answer_tokens = fmean(each.num_output_tokens for each in trace.requests)
    kv_tokens = fmean(each.num_input_tokens for each in trace.requests) + answer_tokens / 2
    answer_seconds = answer_tokens * model.chunk_tokens / model.prefill_tokens_per_second
    plans = [_Plan((), (0.0,) * setting.num_at_first)]
    for number, prompts in enumerate(_bins(trace, model)):
        begin = number * BIN_SECONDS
        if begin > setting.startup_seconds:
            resized = (new for each in plans for new in _resized(each, begin, setting.startup_seconds, answer_seconds))
            plans = list(_cheapest(resized, begin))
        reading = len(prompts) / BIN_SECONDS * answer_tokens * kv_tokens * model.decode_seconds_per_kv_token
        plans = [_served(each, prompts, reading, setting.ttft_seconds, price) for each in plans]
    return min(plans, key=lambda each: each.cost).numbers


def _bins(trace: Trace, model: EngineModel) -> list[list[_Prompt]]:
    bins: list[list[_Prompt]] = [[] for _ in range(int(trace.requests[-1].arrived / BIN_SECONDS) + 1)]
    for each in trace.requests:
        prompt = _Prompt(each.arrived, model.prefill_seconds(each.num_input_tokens, 0))
        bins[int(each.arrived / BIN_SECONDS)].append(prompt)
    return bins


def _resized(plan: _Plan, begin: float, startup_seconds: float, answer_seconds: float) -> Iterator[_Plan]:
    """To every number of replicas; those that go are the least busy, and end what they have."""
    current = len(plan.free_at)
    for num in range(1, current):
        going, staying = plan.free_at[: current - num], plan.free_at[current - num :]
        ends = sum(max(0.0, free_at - begin) + answer_seconds for free_at in going)
        yield replace(plan, free_at=staying, cost=plan.cost + ends)
    yield plan
    for num_more in range(1, MOST_REPLICAS + 1 - current):
        free_at = tuple(sorted((*plan.free_at, *(begin,) * num_more)))
        yield replace(plan, free_at=free_at, cost=plan.cost + num_more * startup_seconds)


def _cheapest(plans: Iterable[_Plan], begin: float) -> Iterable[_Plan]:
    """Of those that go on alike."""
    cheapest: dict[tuple[int, int], _Plan] = {}
    for each in plans:
        backlog = fmean(max(0.0, free_at - begin) for free_at in each.free_at)
        alike = len(each.free_at), sum(backlog > step for step in _BACKLOG_STEPS)
        if alike not in cheapest or each.cost < cheapest[alike].cost:
            cheapest[alike] = each
    return cheapest.values()


def _served(plan: _Plan, prompts: Sequence[_Prompt], reading: float, ttft_seconds: float, price: float) -> _Plan:
    """`reading`: replicas that answers alone would keep busy. First come, first served by whichever is free first."""
    num = len(plan.free_at)
    free_at, num_late = list(plan.free_at), 0
    slowdown = 1 + reading / num
    for prompt in prompts:
        end = max(free_at[0], prompt.arrived) + prompt.prefill_seconds * slowdown
        heapreplace(free_at, end)
        num_late += end - prompt.arrived > ttft_seconds
    return _Plan((*plan.numbers, num), tuple(sorted(free_at)), plan.cost + num * BIN_SECONDS + price * num_late)
