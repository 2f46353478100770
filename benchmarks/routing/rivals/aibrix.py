"""AIBrix, `prefix-cache`: where requests are out of balance, the engine with the fewest; else of the engines that match
most of the prompt the first whose requests are within the mean and so many standard deviations; else the fewest.
"""

from statistics import fmean, pstdev

from benchmarks.routing.blocks import BlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World
from benchmarks.routing.scrape import Scrape

_IMBALANCE = 16
_DEVIATIONS = 1.0
_NUM_BLOCKS = 200_000


class Aibrix(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._index = BlockMap(len(world.engines), _NUM_BLOCKS)
        self._scrape = Scrape(world.engines)

    def choose(self, job: Job, now: float) -> int:
        self._scrape.refresh(now)
        engine = self._choose(job, self._scrape.num_in_flight)
        self._index.insert(engine, job.blocks)
        return engine

    def _choose(self, job: Job, requests: list[int]) -> int:
        fewest = min(range(len(requests)), key=lambda engine: (requests[engine], self.num_in_flight[engine]))
        if max(requests) - min(requests) > _IMBALANCE:
            return fewest
        depths = self._index.depths(job.blocks)
        limit = fmean(requests) + _DEVIATIONS * pstdev(requests)
        for engine in sorted(depths, key=lambda engine: (-depths[engine], requests[engine])):
            if requests[engine] <= limit:
                return engine
        return fewest
