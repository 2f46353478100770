"""llm-d's default profile: queue 2, KV use 2, prefix 3, each from 0 to 1; the highest sum, ties at random.

Metrics are scraped every 50 ms; the prefix index is the approximate one, bounded by each engine's cache.
"""

from benchmarks.routing.blocks import BlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World
from benchmarks.routing.scrape import Scrape

_QUEUE_WEIGHT, _KV_WEIGHT, _PREFIX_WEIGHT = 2.0, 2.0, 3.0


class LlmD(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        capacity_blocks = world.engines[0].model.kv_capacity_tokens // world.block_tokens
        self._index = BlockMap(len(world.engines), capacity_blocks)
        self._scrape = Scrape(world.engines)

    def choose(self, job: Job, now: float) -> int:
        self._scrape.refresh(now)
        depths = self._index.depths(job.blocks)
        waiting = self._scrape.num_waiting
        most, fewest = max(waiting), min(waiting)
        spread = most - fewest
        scores = [
            (_QUEUE_WEIGHT * (most - queue) / spread if spread else _QUEUE_WEIGHT) + _KV_WEIGHT * (1 - usage)
            for queue, usage in zip(waiting, self._scrape.kv_usage, strict=True)
        ]
        for engine, depth in depths.items():
            scores[engine] += _PREFIX_WEIGHT * depth / len(job.blocks)
        best = max(scores)
        engine = self.world.source.choice([engine for engine, score in enumerate(scores) if score == best])
        self._index.insert(engine, job.blocks)
        return engine
