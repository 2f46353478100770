"""SGLang's router and SMG, `cache_aware`, with the thresholds of SMG's command line.

Where requests in flight are out of balance, the engine with the fewest; else the engine that used the longest matching
prefix last, if it matches enough of the prompt; else the engine with the fewest.
"""

from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World

_MATCH_THRESHOLD = 0.3
_BALANCE_ABS, _BALANCE_REL = 64, 1.5


class SglangCacheAware(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._last_user: dict[int, int] = {}  # block -> engine

    def choose(self, job: Job, now: float) -> int:
        engine = self._choose(job)
        self._last_user.update(dict.fromkeys(job.blocks, engine))
        return engine

    def _choose(self, job: Job) -> int:
        most, fewest = max(self.num_in_flight), min(self.num_in_flight)
        if most - fewest > _BALANCE_ABS and most > _BALANCE_REL * fewest:
            return self.least_in_flight()
        depth = next((i for i, block in enumerate(job.blocks) if block not in self._last_user), len(job.blocks))
        if depth * self.world.block_tokens > _MATCH_THRESHOLD * job.num_input_tokens:
            return self._last_user[job.blocks[depth - 1]]
        return self.least_in_flight()
