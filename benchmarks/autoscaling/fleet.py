"""Replicas that start, serve, drain and go, and a router that sends each request where its prefill ends first."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.autoscaling.decode_engine import DecodeEngine
from benchmarks.routing.engine import CacheUpdate, Engine, EngineModel
from benchmarks.routing.job import Job


class Stage(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class Replica:
    engine: Engine
    begun_at: float
    serves_at: float
    stage: Stage
    gone_at: float | None = None
    scrapes: list["Scrape"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"pod-{self.engine.number}"


@dataclass(frozen=True, slots=True)
class Scrape:
    at: float
    kv_used_tokens: int
    num_running: int
    num_waiting: int
    uncached_tokens: int


class Fleet:
    """`replicas` keeps those that are gone, for what they cost."""

    def __init__(
        self,
        model: EngineModel,
        block_tokens: int,
        startup_seconds: float,
        num_serving: int,
        engine: type[Engine] = Engine,
    ) -> None:
        self._model = model
        self._engine = engine
        self._block_tokens = block_tokens
        self._startup_seconds = startup_seconds
        self._updates: list[CacheUpdate] = []
        self.replicas: list[Replica] = []
        self.held: list[Job] = []
        for _ in range(num_serving):
            self._add(0.0, 0.0, Stage.SERVING)

    def in_stage(self, *stages: Stage) -> list[Replica]:
        return [replica for replica in self.replicas if replica.stage in stages]

    @property
    def num_wanted(self) -> int:
        return len(self.in_stage(Stage.STARTING, Stage.SERVING))

    def scale(self, wanted: int, now: float) -> Iterator[Replica]:
        """Yields those that begin. Those that have not begun to serve go first, then those with the least work."""
        for _ in range(wanted - self.num_wanted):
            yield self._add(now, now + self._startup_seconds, Stage.STARTING)
        for _ in range(self.num_wanted - wanted):
            starting = self.in_stage(Stage.STARTING)
            if starting:
                self._end(starting[-1], now)
                continue
            going = min(self.in_stage(Stage.SERVING), key=lambda replica: replica.engine.num_in_flight)
            going.stage = Stage.DRAINING
            self.end_if_drained(going, now)

    def end_if_drained(self, replica: Replica, now: float) -> None:
        if replica.stage is Stage.DRAINING and not replica.engine.num_in_flight:
            self._end(replica, now)

    def send(self, job: Job, now: float) -> Replica | None:
        """None: no replica serves, and the router holds it."""
        self._updates.clear()
        serving = self.in_stage(Stage.SERVING)
        if not serving:
            self.held.append(job)
            return None
        chosen = min(serving, key=lambda replica: self._prefill_tokens_until_done(replica.engine, job, now))
        chosen.engine.submit(job, now)
        return chosen

    def take(self, job: Job, now: float) -> Replica | None:
        """A prompt that is computed goes where the cache is emptiest; None: no replica has a place, and it is held."""
        self._updates.clear()
        for replica in sorted(self.in_stage(Stage.SERVING), key=lambda each: each.engine.kv_usage):
            if isinstance(replica.engine, DecodeEngine) and replica.engine.take(job, now):
                return replica
        self.held.append(job)
        return None

    def scrape(self, now: float) -> None:
        for replica in self.in_stage(Stage.SERVING):
            engine = replica.engine
            uncached = engine.waiting_uncached_tokens + engine.running_uncached_tokens(now)
            scrape = Scrape(now, engine.kv_used_tokens, engine.num_running, len(engine.waiting), uncached)
            replica.scrapes = [each for each in replica.scrapes if each.at > now - 60] + [scrape]

    def replica_seconds(self, end: float) -> float:
        """From the begin of the start to the end of the drain."""
        return sum((end if each.gone_at is None else each.gone_at) - each.begun_at for each in self.replicas)

    def _prefill_tokens_until_done(self, engine: Engine, job: Job, now: float) -> float:
        """A full cache makes it wait for an answer's end, whatever its prefill."""
        queued = engine.waiting_uncached_tokens + engine.running_uncached_tokens(now)
        is_full = engine.kv_usage > 0.9
        return queued + job.num_input_tokens - engine.cached_tokens(job) + (1e6 * engine.kv_usage if is_full else 0.0)

    def _add(self, now: float, serves_at: float, stage: Stage) -> Replica:
        engine = self._engine(len(self.replicas), self._model, self._block_tokens, self._updates)
        self.replicas.append(Replica(engine, now, serves_at, stage))
        return self.replicas[-1]

    def _end(self, replica: Replica, now: float) -> None:
        replica.stage, replica.gone_at = Stage.GONE, now
