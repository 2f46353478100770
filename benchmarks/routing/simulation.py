"""A trace through some routers and engines in virtual time: a calendar of events, and nothing that waits."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from random import Random
from statistics import fmean

from benchmarks.routing.engine import CacheUpdate, Engine, EngineModel
from benchmarks.routing.job import Job
from benchmarks.routing.report import report_of
from benchmarks.routing.rules import HeardReport, Rule, World
from benchmarks.routing.trace import Trace

from kvasir_router.dialects.completions import Completions
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest

_REPORT_INTERVAL_SECONDS = 0.05  # 20 Hz
_LONGEST_SILENCE_SECONDS = 1.0  # while a prompt is prefilled
# Requests that have waited leave a router no faster than reports tell the others, or one would take all the room.
_PACE_SECONDS = 0.1

MakeRules = Callable[[World, int], list[Rule]]
"""(world, number of routers) -> the rule of each router."""


@dataclass(frozen=True, slots=True)
class Setting:
    speed: float
    num_replicas: int
    num_routers: int
    model: EngineModel = field(default_factory=EngineModel)
    late_seconds: float = 0.05
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    mean: float  # seconds to first token
    p50: float
    p90: float
    p99: float
    balance: float  # prefill work of the busiest engine over the mean


class _Simulation:
    def __init__(self, trace: Trace, setting: Setting, make_rules: MakeRules) -> None:
        updates: list[CacheUpdate] = []
        self._engines = [
            Engine(number, setting.model, trace.block_tokens, updates) for number in range(setting.num_replicas)
        ]
        self._world = World(
            self._engines, trace.block_tokens, setting.late_seconds, updates, [], Random(f"rules-{setting.seed}")
        )
        self._rules = make_rules(self._world, setting.num_routers)
        self._queues: list[deque[Job]] = [deque() for _ in self._rules]
        self._late_seconds = setting.late_seconds
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._reported_at = [-inf] * setting.num_replicas
        self._report_at = [inf] * setting.num_replicas
        self._wake_at = [inf] * setting.num_routers

    def run(self, jobs: list[Job]) -> None:
        calendar = self._calendar
        for job in jobs:
            while calendar and calendar[0][0] <= job.arrived:
                at, _, happen = heappop(calendar)
                happen(at)
            self._arrive(job)
        while calendar:
            at, _, happen = heappop(calendar)
            happen(at)

    def engines(self) -> list[Engine]:
        return self._engines

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        self._num_events += 1
        heappush(self._calendar, (at, self._num_events, happen))

    def _arrive(self, job: Job) -> None:
        queue = self._queues[job.router]
        queue.append(job)
        if len(queue) == 1:
            self._place(job.router, job.arrived)

    def _place(self, router: int, now: float) -> None:
        """First come, first served."""
        queue, rule = self._queues[router], self._rules[router]
        while queue:
            engine = rule.pick(queue[0], now)
            if engine is None:
                self._wake_later(router, rule.retry_at(now))
                return
            job = queue.popleft()
            job.engine = engine
            self._engines[engine].submit(job, now)
            self._changed(self._engines[engine], now)
            if queue and now > job.arrived:
                self._wake_later(router, now + _PACE_SECONDS)
                return

    def _wake_later(self, router: int, at: float) -> None:
        if at < self._wake_at[router]:
            self._wake_at[router] = at
            self._at(at, lambda now: self._wake(router, now))

    def _wake(self, router: int, now: float) -> None:
        if now == self._wake_at[router]:
            self._wake_at[router] = inf
            self._place(router, now)

    def _changed(self, engine: Engine, now: float) -> None:
        at = engine.next_event()
        if at != engine.event_at:
            engine.event_at = at
            if at < inf:
                self._at(at, lambda now: self._proceed(engine, now))
        self._report_by(engine, max(now, self._reported_at[engine.number] + _REPORT_INTERVAL_SECONDS))

    def _proceed(self, engine: Engine, now: float) -> None:
        if now != engine.event_at:
            return
        engine.proceed(now)
        first_tokens, finished = engine.first_tokens, engine.finished
        engine.first_tokens, engine.finished = [], []
        for job in first_tokens:
            self._rules[job.router].first_token(job, now)
        for job in finished:
            self._rules[job.router].finish(job, now)
        self._changed(engine, now)
        for router in {job.router for job in (*first_tokens, *finished)}:
            if self._queues[router]:
                self._wake_later(router, now + self._late_seconds)

    def _report_by(self, engine: Engine, at: float) -> None:
        if at < self._report_at[engine.number]:
            self._report_at[engine.number] = at
            self._at(at, lambda now: self._report(engine, now))

    def _report(self, engine: Engine, now: float) -> None:
        if now != self._report_at[engine.number]:
            return
        self._report_at[engine.number], self._reported_at[engine.number] = inf, now
        arrived, engine.arrived = tuple(engine.arrived), []
        self._world.reports.append(
            HeardReport(now + self._late_seconds, engine.number, report_of(engine, arrived, now))
        )
        if engine.prefilling is not None:
            self._report_by(engine, now + _LONGEST_SILENCE_SECONDS)


def simulate(trace: Trace, setting: Setting, make_rules: MakeRules) -> Outcome:
    simulation = _Simulation(trace, setting, make_rules)
    jobs = _jobs(trace, setting)
    simulation.run(jobs)
    return _outcome(jobs, simulation.engines())


def _jobs(trace: Trace, setting: Setting) -> list[Job]:
    """A router is drawn for each request, as a Service before routers does."""
    source, dialect = Random(f"routers-{setting.seed}"), Completions()
    jobs = []
    for number, traced in enumerate(trace.requests):
        full_blocks = traced.blocks[: traced.num_input_tokens // trace.block_tokens]
        request = InferenceRequest(
            "/v1/completions", dialect, "m", True, BlockHashes(traced.num_input_tokens, full_blocks), str(number)
        )
        router = source.randrange(setting.num_routers)
        jobs.append(Job(number, traced, traced.arrived / setting.speed, request, router))
    return jobs


def _outcome(jobs: list[Job], engines: list[Engine]) -> Outcome:
    seconds = sorted(job.first_token_at - job.arrived for job in jobs)
    work = [engine.work_seconds for engine in engines]
    return Outcome(
        hit_rate=sum(engine.num_cached_tokens for engine in engines)
        / sum(engine.num_prompt_tokens for engine in engines),
        mean=fmean(seconds),
        p50=_quantile(seconds, 0.5),
        p90=_quantile(seconds, 0.9),
        p99=_quantile(seconds, 0.99),
        balance=max(work) / fmean(work),
    )


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)]
