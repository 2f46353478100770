"""The seam between a simulation and a routing rule: one `Rule` a router, all of them in one `World`."""

from dataclasses import dataclass
from math import inf
from random import Random
from typing import Protocol

from benchmarks.routing.engine import CacheUpdate, Engine
from benchmarks.routing.job import Job

from kvasir_router.service.load_report import LoadReport


@dataclass(frozen=True, slots=True)
class HeardReport:
    at: float  # when routers have it
    engine: int
    report: LoadReport


@dataclass(slots=True)
class World:
    """What rules may know of: engines through their metrics, their caches' updates and their reports, both late."""

    engines: list[Engine]
    block_tokens: int
    late_seconds: float
    updates: list[CacheUpdate]
    reports: list[HeardReport]
    source: Random


class Rule(Protocol):
    """Of one router. Moments are seconds of virtual time."""

    def pick(self, job: Job, now: float) -> int | None:
        """The engine's number, counted on it from now on; None: it stays with the router, to be asked again."""
        ...

    def first_token(self, job: Job, now: float) -> None: ...

    def finish(self, job: Job, now: float) -> None: ...

    def retry_at(self, now: float) -> float:
        """When what was refused may be placed, if nothing else happens."""
        ...


class EagerRule:
    """What rules have in common that bind at once. `pick` is `choose` and the counting after it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_in_flight = [0] * len(world.engines)

    def choose(self, job: Job, now: float) -> int:
        raise NotImplementedError

    def pick(self, job: Job, now: float) -> int | None:
        engine = self.choose(job, now)
        self.num_in_flight[engine] += 1
        return engine

    def first_token(self, job: Job, now: float) -> None:
        """Most rules count requests only."""

    def finish(self, job: Job, now: float) -> None:
        self.num_in_flight[job.engine] -= 1

    def retry_at(self, now: float) -> float:
        return inf

    def least_in_flight(self) -> int:
        return min(range(len(self.num_in_flight)), key=self.num_in_flight.__getitem__)
