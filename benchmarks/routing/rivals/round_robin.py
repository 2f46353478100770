"""In turn."""

from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World


class RoundRobin(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._next = world.source.randrange(len(world.engines))

    def choose(self, job: Job, now: float) -> int:
        self._next = (self._next + 1) % len(self.world.engines)
        return self._next
