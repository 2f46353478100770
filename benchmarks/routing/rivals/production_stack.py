"""production-stack, `prefixaware`: any of the engines that match the prompt deepest. Nothing is forgotten, no load."""

from benchmarks.routing.blocks import BlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World


class ProductionStack(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._index = BlockMap(len(world.engines))

    def choose(self, job: Job, now: float) -> int:
        depths = self._index.depths(job.blocks)
        deepest = max(depths.values(), default=0)
        among = [engine for engine, depth in depths.items() if depth == deepest] or range(len(self.world.engines))
        engine = self.world.source.choice(among)
        self._index.insert(engine, job.blocks)
        return engine
