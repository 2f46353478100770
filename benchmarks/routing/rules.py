"""The seam between a simulation and a routing rule: one `Rule` a router, all of them in one `World`."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from benchmarks.routing.engine import CacheUpdate, Engine
from benchmarks.routing.job import Job

from kvasir_router.service.load_report import LoadReport


@dataclass(slots=True)
class World:
    """What rules may know of: engines through their metrics, and their caches' updates, late. `send` takes a job to an
    engine, by number. `peer_seconds`: how late routers hear each other; None: not at all."""

    engines: list[Engine]
    block_tokens: int
    late_seconds: float
    updates: list[CacheUpdate]
    source: Random
    send: Callable[[Job, int], None]
    peer_seconds: float | None = None


class Rule(Protocol):
    """Of one router. Moments are seconds of the running loop's virtual time."""

    async def arrive(self, job: Job) -> None:
        """Returns once it has sent the job to an engine."""
        ...

    def first_token(self, job: Job, now: float) -> None: ...

    def finish(self, job: Job, now: float) -> None: ...

    def report(self, engine: int, report: LoadReport, now: float) -> None:
        """An engine's word, when it is heard."""
        ...

    def every_second(self, now: float) -> None: ...


class EagerRule:
    """What rules have in common that bind at once, by number of requests, and do not hear engines."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_in_flight = [0] * len(world.engines)

    def choose(self, job: Job, now: float) -> int:
        raise NotImplementedError

    async def arrive(self, job: Job) -> None:
        engine = self.choose(job, job.arrived)
        self.num_in_flight[engine] += 1
        self.world.send(job, engine)

    def first_token(self, job: Job, now: float) -> None:
        pass

    def finish(self, job: Job, now: float) -> None:
        self.num_in_flight[job.engine] -= 1

    def report(self, engine: int, report: LoadReport, now: float) -> None:
        pass

    def every_second(self, now: float) -> None:
        pass

    def least_in_flight(self) -> int:
        return min(range(len(self.num_in_flight)), key=self.num_in_flight.__getitem__)
