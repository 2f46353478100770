"""A trace through the fleets that a rule scales, in virtual time: one that serves, or one that prefills for another
that decodes, each of which scales for itself."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from statistics import median

from benchmarks.autoscaling.decode_engine import DecodeEngine
from benchmarks.autoscaling.fleet import Fleet, Replica, Stage
from benchmarks.autoscaling.role import Role, itl_seconds
from benchmarks.autoscaling.rule import Rules
from benchmarks.routing.engine import Engine, EngineModel
from benchmarks.routing.job import Job
from benchmarks.routing.trace import Trace, TraceRequest

from kvasir_router.dialects.text_prompts import Completions
from kvasir_router.prefix_index.approximate import BlockHashes
from kvasir_router.request import InferenceRequest

SERVE, PREFILL, DECODE = "serve", "prefill", "decode"
_SCRAPE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """`can_sleep`: rules may go to zero. A transfer of KV is exposed for its last chunk."""

    model: EngineModel
    ttft_seconds: float
    itl_seconds: float
    startup_seconds: float = 120.0
    num_at_first: int = 2
    is_split: bool = False
    can_sleep: bool = False
    transfer_tokens_per_second: float = 100_000.0
    transfer_latency_seconds: float = 0.005

    @property
    def roles(self) -> tuple[str, ...]:
        return (PREFILL, DECODE) if self.is_split else (SERVE,)


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
    wake_seconds: tuple[float, ...] = ()
    """From each first request at zero until one was sent to an engine."""

    @property
    def wake_p50_seconds(self) -> float | None:
        return median(self.wake_seconds) if self.wake_seconds else None


class _Simulation:
    """One calendar of moments; engines say themselves when something ends in them."""

    def __init__(self, trace: Trace, setting: Setting, rules: Rules) -> None:
        self._setting, self._rules = setting, rules
        self._roles = {name: Role(_fleet(name, trace, setting)) for name in setting.roles}
        self._entry = self._roles[setting.roles[0]]
        self._jobs = _jobs(trace)
        self._end = trace.requests[-1].arrived
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._ids = count()
        self._finished_at: dict[int, float] = {}
        self._wake_begun_at: float | None = None
        self._wake_seconds: list[float] = []

    def run(self) -> Outcome:
        for job in self._jobs:
            self._at(job.arrived, partial(self._arrive, job))
        self._at(_SCRAPE_SECONDS, self._scrape)
        self._at(self._rules.interval_seconds, self._ask)
        while self._calendar:
            at, _, happen = heappop(self._calendar)
            happen(at)
        return self._outcome()

    def _arrive(self, job: Job, now: float) -> None:
        """What no replica takes has arrived all the same; nothing of it is known to be cached."""
        num_expected_cached = self._send(job, now)
        self._entry.arrived(now, job.num_input_tokens - num_expected_cached)

    def _send(self, job: Job, now: float) -> int:
        """Prompt tokens that its replica is to have cached."""
        if self._wake_begun_at is None and not all(role.fleet.num_wanted for role in self._roles.values()):
            self._wake_begun_at = now
        sent = _prefill_of(job) if self._setting.is_split else job
        replica = self._entry.fleet.send(sent, now)
        if replica is None:
            return 0
        if self._wake_begun_at is not None:
            self._wake_seconds.append(now - self._wake_begun_at)
            self._wake_begun_at = None
        self._changed(self._entry, replica)
        return sent.num_expected_cached

    def _changed(self, role: Role, replica: Replica) -> None:
        engine = replica.engine
        at = engine.next_event()
        if at != engine.event_at:
            engine.event_at = at
            if at < inf:
                self._at(at, partial(self._proceed, role, replica))

    def _proceed(self, role: Role, replica: Replica, now: float) -> None:
        engine = replica.engine
        if now != engine.event_at:
            return
        engine.proceed(now)
        self._note_ends(role, engine, now)
        role.fleet.end_if_drained(replica, now)
        self._changed(role, replica)

    def _note_ends(self, role: Role, engine: Engine, now: float) -> None:
        for job in engine.first_tokens:
            role.first_token(now, now - job.arrived)
            if self._setting.is_split:
                original = self._jobs[job.number]
                self._at(now + self._transfer_seconds(original), partial(self._decode, original))
        for job in engine.finished:
            if not (self._setting.is_split and role is self._entry):
                self._finished_at[job.number] = now
                role.finished(job, now)
        has_room = bool(engine.finished)
        engine.first_tokens, engine.finished = [], []
        if has_room and role is not self._entry:
            self._retry_decodes(now)

    def _transfer_seconds(self, job: Job) -> float:
        setting = self._setting
        tokens = min(job.num_input_tokens, setting.model.chunk_tokens)
        return setting.transfer_latency_seconds + tokens / setting.transfer_tokens_per_second

    def _decode(self, job: Job, now: float) -> None:
        role = self._roles[DECODE]
        replica = role.fleet.take(job, now)
        if replica is not None:
            self._changed(role, replica)

    def _retry_decodes(self, now: float) -> None:
        fleet = self._roles[DECODE].fleet
        held, fleet.held = fleet.held, []
        for job in held:
            self._decode(job, now)

    def _scrape(self, now: float) -> None:
        for role in self._roles.values():
            role.fleet.scrape(now)
        self._every(_SCRAPE_SECONDS, self._scrape, now)

    def _ask(self, now: float) -> None:
        held = self._entry.fleet.held
        views = {name: role.view(now, held or role.fleet.held) for name, role in self._roles.items()}
        for name, wanted in self._rules.wanted(views).items():
            self._scale(self._roles[name], wanted, now)
        self._every(self._rules.interval_seconds, self._ask, now)

    def _scale(self, role: Role, wanted: int, now: float) -> None:
        if wanted == role.fleet.num_wanted:
            return
        role.wanted.append(wanted)
        for replica in list(role.fleet.scale(wanted, now)):
            self._at(replica.serves_at, partial(self._serve, role, replica))

    def _serve(self, role: Role, replica: Replica, now: float) -> None:
        if replica.stage is not Stage.STARTING:
            return
        replica.stage = Stage.SERVING
        if role is not self._entry:
            self._retry_decodes(now)
            return
        held, role.fleet.held = role.fleet.held, []
        for job in held:
            self._send(self._jobs[job.number], now)

    def _every(self, seconds: float, happen: Callable[[float], None], now: float) -> None:
        if now + seconds <= self._end:
            self._at(now + seconds, happen)

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        heappush(self._calendar, (at, next(self._ids), happen))

    def _outcome(self) -> Outcome:
        roles = self._roles.values()
        end = max(self._end, *self._finished_at.values())
        kept = sum(self._is_kept(job) for job in self._jobs)
        deltas = [[later - earlier for earlier, later in pairwise(role.wanted)] for role in roles]
        wasted = (
            each.gone_at - each.begun_at
            for role in roles
            for each in role.fleet.replicas
            if each.gone_at is not None and each.gone_at < each.serves_at + 300 and each.begun_at > 0
        )
        return Outcome(
            kept / len(self._jobs),
            sum(role.fleet.replica_seconds(end) for role in roles) / 3600,
            sum(max(role.wanted) for role in roles),
            sum(map(len, deltas)),
            sum(one * other < 0 for each in deltas for one, other in pairwise(each)),
            sum(wasted) / 3600,
            tuple(self._wake_seconds),
        )

    def _is_kept(self, job: Job) -> bool:
        if job.number not in self._finished_at or job.first_token_at - job.arrived > self._setting.ttft_seconds:
            return False
        return itl_seconds(job, self._finished_at[job.number]) <= self._setting.itl_seconds


def simulate(trace: Trace, setting: Setting, rules: Rules) -> Outcome:
    return _Simulation(trace, setting, rules).run()


def _fleet(role: str, trace: Trace, setting: Setting) -> Fleet:
    engine = DecodeEngine if role == DECODE else Engine
    return Fleet(setting.model, trace.block_tokens, setting.startup_seconds, setting.num_at_first, engine)


def _jobs(trace: Trace) -> list[Job]:
    return [_job(number, traced) for number, traced in enumerate(trace.requests)]


def _job(number: int, traced: TraceRequest) -> Job:
    request = InferenceRequest(Completions(), "m", True, BlockHashes(1, ()), "")
    return Job(number, traced, traced.arrived, request, 0)


def _prefill_of(job: Job) -> Job:
    """Its prompt, and one token."""
    return _job(job.number, TraceRequest(job.arrived, job.num_input_tokens, 1, job.blocks))
