"""A trace through a fleet that a rule scales, in virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from statistics import fmean

from benchmarks.autoscaling.fleet import Fleet, Replica, Stage
from benchmarks.autoscaling.rule import Rule
from benchmarks.autoscaling.view import FleetView, ReplicaView
from benchmarks.routing.engine import Engine, EngineModel
from benchmarks.routing.job import Job
from benchmarks.routing.trace import Trace

from kvasir_router.dialects.completions import Completions
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest

_SCRAPE_SECONDS = 5.0
_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    model: EngineModel
    ttft_seconds: float
    itl_seconds: float
    startup_seconds: float = 120.0
    num_at_first: int = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """`attainment`: share of requests with both latencies within the SLO. `num_turns`: changes of direction."""

    attainment: float
    replica_hours: float
    peak: int
    num_changes: int
    num_turns: int
    wasted_hours: float
    """Of replicas that were let go before they had served for five minutes."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    at: float
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class _Latency:
    at: float
    seconds: float


class _Simulation:
    """One calendar of moments; engines say themselves when something ends in them."""

    def __init__(self, trace: Trace, setting: Setting, rule: Rule) -> None:
        self._setting, self._rule = setting, rule
        self._fleet = Fleet(setting.model, trace.block_tokens, setting.startup_seconds, setting.num_at_first)
        self._jobs = _jobs(trace)
        self._end = trace.requests[-1].arrived
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = count()
        self._arrivals: deque[_Arrival] = deque()
        self._ttft: deque[_Latency] = deque()
        self._itl: deque[_Latency] = deque()
        self._num_output, self._num_finished = 0.0, 0
        self._finished_at: dict[int, float] = {}
        self.history = [setting.num_at_first]

    def run(self) -> Outcome:
        for job in self._jobs:
            self._at(job.arrived, partial(self._arrive, job))
        self._at(_SCRAPE_SECONDS, self._scrape)
        self._at(self._rule.interval_seconds, self._ask)
        while self._calendar:
            at, _, happen = heappop(self._calendar)
            happen(at)
        return self._outcome()

    def _arrive(self, job: Job, now: float) -> None:
        replica = self._fleet.send(job, now)
        if replica is not None:
            self._arrivals.append(_Arrival(now, job.num_input_tokens - job.num_expected_cached))
            self._changed(replica)

    def _changed(self, replica: Replica) -> None:
        engine = replica.engine
        at = engine.next_event()
        if at != engine.event_at:
            engine.event_at = at
            if at < inf:
                self._at(at, partial(self._proceed, replica))

    def _proceed(self, replica: Replica, now: float) -> None:
        engine = replica.engine
        if now != engine.event_at:
            return
        engine.proceed(now)
        self._note_ends(engine, now)
        self._fleet.end_if_drained(replica, now)
        self._changed(replica)

    def _note_ends(self, engine: Engine, now: float) -> None:
        for job in engine.first_tokens:
            self._ttft.append(_Latency(now, now - job.arrived))
        for job in engine.finished:
            self._finished_at[job.number] = now
            self._itl.append(_Latency(now, _itl_seconds(job, now)))
            self._num_output, self._num_finished = self._num_output + job.num_output_tokens, self._num_finished + 1
        engine.first_tokens, engine.finished = [], []

    def _scrape(self, now: float) -> None:
        self._fleet.scrape(now)
        self._every(_SCRAPE_SECONDS, self._scrape, now)

    def _ask(self, now: float) -> None:
        wanted = self._rule.wanted(self._view(now))
        if wanted != self._fleet.num_wanted:
            self.history.append(wanted)
            for replica in list(self._fleet.scale(wanted, now)):
                self._at(replica.serves_at, partial(self._serve, replica))
        self._every(self._rule.interval_seconds, self._ask, now)

    def _serve(self, replica: Replica, now: float) -> None:
        if replica.stage is not Stage.STARTING:
            return
        replica.stage = Stage.SERVING
        held, self._fleet.held = self._fleet.held, []
        for job in held:
            self._arrive(job, now)

    def _every(self, seconds: float, happen: Callable[[float], None], now: float) -> None:
        if now + seconds <= self._end:
            self._at(now + seconds, happen)

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        heappush(self._calendar, (at, next(self._ids), happen))

    def _view(self, now: float) -> FleetView:
        for latencies in (self._ttft, self._itl):
            while latencies and latencies[0].at < now - _WINDOW_SECONDS:
                latencies.popleft()
        while self._arrivals and self._arrivals[0].at < now - _WINDOW_SECONDS:
            self._arrivals.popleft()
        tokens = [each.uncached_tokens for each in self._arrivals]
        held = self._fleet.held
        return FleetView(
            now,
            self._fleet.num_wanted,
            tuple(_replica_view(each, now) for each in self._fleet.in_stage(Stage.SERVING) if each.scrapes),
            len(held),
            sum(job.num_input_tokens for job in held),
            len(self._itl) / min(_WINDOW_SECONDS, now),
            sum(tokens) / min(_WINDOW_SECONDS, now),
            fmean(tokens) if tokens else 0.0,
            self._num_output / self._num_finished if self._num_finished else 0.0,
            _p90(self._ttft),
            _p90(self._itl),
        )

    def _outcome(self) -> Outcome:
        end = max(self._end, *self._finished_at.values())
        kept = sum(self._is_kept(job) for job in self._jobs)
        deltas = [later - earlier for earlier, later in pairwise(self.history)]
        wasted = (
            each.gone_at - each.begun_at
            for each in self._fleet.replicas
            if each.gone_at is not None and each.gone_at < each.serves_at + 300 and each.begun_at > 0
        )
        return Outcome(
            kept / len(self._jobs),
            self._fleet.replica_seconds(end) / 3600,
            max(self.history),
            len(deltas),
            sum(one * other < 0 for one, other in pairwise(deltas)),
            sum(wasted) / 3600,
        )

    def _is_kept(self, job: Job) -> bool:
        if job.first_token_at - job.arrived > self._setting.ttft_seconds:
            return False
        return _itl_seconds(job, self._finished_at[job.number]) <= self._setting.itl_seconds


def simulate(trace: Trace, setting: Setting, rule: Rule) -> Outcome:
    return _Simulation(trace, setting, rule).run()


def _jobs(trace: Trace) -> list[Job]:
    request = InferenceRequest("/v1/completions", Completions(), "m", True, BlockHashes(1, ()), "")
    return [Job(number, traced, traced.arrived, request, 0) for number, traced in enumerate(trace.requests)]


def _itl_seconds(job: Job, finished_at: float) -> float:
    return (finished_at - job.first_token_at) / max(1, job.num_output_tokens - 1)


def _p90(latencies: Sequence[_Latency]) -> float | None:
    ascending = sorted(each.seconds for each in latencies)
    return ascending[int(len(ascending) * 0.9)] if ascending else None


def _replica_view(replica: Replica, now: float) -> ReplicaView:
    scrapes, last, engine = replica.scrapes, replica.scrapes[-1], replica.engine
    return ReplicaView(
        replica.name,
        now - replica.serves_at,
        fmean(each.kv_used_tokens for each in scrapes),
        last.kv_used_tokens,
        engine.model.kv_capacity_tokens,
        fmean(each.num_running for each in scrapes),
        fmean(each.num_waiting for each in scrapes),
        max(each.num_waiting for each in scrapes),
        fmean(each.uncached_tokens for each in scrapes),
        last.uncached_tokens,
        engine.prefill_tokens_per_second,
        1 / engine.steps_per_second if engine.steps_per_second else 0.0,
    )
