"""A trace through some routers and engines in virtual time, which an event loop keeps: routers are as they run."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from math import inf
from random import Random
from statistics import fmean

from benchmarks.routing.engine import CacheUpdate, Engine, EngineModel
from benchmarks.routing.job import Job, request_of
from benchmarks.routing.report import report_of
from benchmarks.routing.rules import Rule, World
from benchmarks.routing.trace import Trace
from benchmarks.routing.virtual_time import VirtualTimeLoop

from kvasir_router.service.load_report import LoadReport

_REPORT_INTERVAL_SECONDS = 0.05  # 20 Hz

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
    peer_seconds: float | None = None  # None: routers do not hear each other


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    mean: float  # seconds to first token
    p50: float
    p90: float
    p99: float
    balance: float  # prefill work of the busiest engine over the mean
    token_mean: float  # seconds between two tokens of an answer
    token_p99: float
    end_mean: float  # seconds to the last token
    end_p99: float
    requests_balance: float  # requests of the engine with the most over the mean


class _Simulation:
    """Its events are the loop's timers; a job is a task from its arrival until it is sent."""

    def __init__(self, trace: Trace, setting: Setting, make_rules: MakeRules) -> None:
        updates: list[CacheUpdate] = []
        slowdowns = chain(trace.decode_slowdowns, repeat(1.0))
        self._engines = [
            Engine(number, setting.model.decoding_slower(times), trace.block_tokens, updates)
            for number, times in zip(range(setting.num_replicas), slowdowns, strict=False)
        ]
        source = Random(f"rules-{setting.seed}")
        self._world = World(
            self._engines, trace.block_tokens, setting.late_seconds, updates, source, self._send, setting.peer_seconds
        )
        self._loop = asyncio.get_running_loop()
        self._rules = make_rules(self._world, setting.num_routers)
        self._late_seconds = setting.late_seconds
        self._reported_at = [-inf] * setting.num_replicas
        self._report_at = [inf] * setting.num_replicas
        self._num_left = 0
        self._all_finished = asyncio.Event()

    async def run(self, jobs: list[Job]) -> list[Engine]:
        self._num_left = len(jobs)
        self._every_second(1.0)
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await asyncio.sleep(job.arrived - self._loop.time())
                group.create_task(self._rules[job.router].arrive(job))
        await self._all_finished.wait()
        return self._engines

    def _every_second(self, now: float) -> None:
        for rule in self._rules:
            rule.every_second(now)
        if self._num_left:
            self._at(now + 1.0, self._every_second)

    def _send(self, job: Job, engine: int) -> None:
        now = self._loop.time()
        job.engine = engine
        self._engines[engine].submit(job, now)
        self._changed(self._engines[engine], now)

    def _changed(self, engine: Engine, now: float) -> None:
        at = engine.next_event()
        if at != engine.event_at:
            engine.event_at = at
            if at < inf:
                self._at(at, partial(self._proceed, engine))
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
            self._finish(job, now)
        self._changed(engine, now)

    def _finish(self, job: Job, now: float) -> None:
        job.finished_at = now
        self._rules[job.router].finish(job, now)
        self._num_left -= 1
        if not self._num_left:
            self._all_finished.set()

    def _report_by(self, engine: Engine, at: float) -> None:
        if at < self._report_at[engine.number]:
            self._report_at[engine.number] = at
            self._at(at, partial(self._report, engine))

    def _report(self, engine: Engine, now: float) -> None:
        if now != self._report_at[engine.number]:
            return
        self._report_at[engine.number], self._reported_at[engine.number] = inf, now
        arrived, engine.arrived = tuple(engine.arrived), []
        report = report_of(engine, arrived, now)
        self._at(now + self._late_seconds, lambda heard: self._hear(engine.number, report, heard))
        if engine.prefilling is not None:
            self._report_by(engine, now + max(engine.chunk_seconds, _REPORT_INTERVAL_SECONDS))

    def _hear(self, engine: int, report: LoadReport, now: float) -> None:
        for rule in self._rules:
            rule.report(engine, report, now)

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        self._loop.call_at(at, happen, at)


def simulate(trace: Trace, setting: Setting, make_rules: MakeRules) -> Outcome:
    jobs = _jobs(trace, setting)
    loop = VirtualTimeLoop()
    try:
        engines = loop.run_until_complete(_run(jobs, trace, setting, make_rules))
    finally:
        loop.close()
    return _outcome(jobs, engines)


async def _run(jobs: list[Job], trace: Trace, setting: Setting, make_rules: MakeRules) -> list[Engine]:
    return await _Simulation(trace, setting, make_rules).run(jobs)


def _jobs(trace: Trace, setting: Setting) -> list[Job]:
    """A router is drawn for each request, as a Service before routers does."""
    source = Random(f"routers-{setting.seed}")
    jobs = []
    for number, traced in enumerate(trace.requests):
        request = request_of(number, traced, trace.block_tokens, can_transfer_kv=True)
        router = source.randrange(setting.num_routers)
        jobs.append(Job(number, traced, traced.arrived / setting.speed, request, router))
    return jobs


def _outcome(jobs: list[Job], engines: list[Engine]) -> Outcome:
    seconds = sorted(job.first_token_at - job.arrived for job in jobs)
    ends = sorted(job.finished_at - job.arrived for job in jobs)
    tokens = sorted(
        (job.finished_at - job.first_token_at) / (job.num_output_tokens - 1)
        for job in jobs
        if job.num_output_tokens > 1
    )
    work = [engine.work_seconds for engine in engines]
    num_requests = Counter(job.engine for job in jobs)
    return Outcome(
        hit_rate=sum(engine.num_cached_tokens for engine in engines)
        / sum(engine.num_prompt_tokens for engine in engines),
        mean=fmean(seconds),
        p50=quantile(seconds, 0.5),
        p90=quantile(seconds, 0.9),
        p99=quantile(seconds, 0.99),
        balance=max(work) / fmean(work),
        token_mean=fmean(tokens),
        token_p99=quantile(tokens, 0.99),
        end_mean=fmean(ends),
        end_p99=quantile(ends, 0.99),
        requests_balance=max(num_requests.values()) * len(engines) / len(jobs),
    )


def quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(int(len(ascending) * share), len(ascending) - 1)]
