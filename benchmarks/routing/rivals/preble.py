"""Preble's E2 (Srivatsa et al., arXiv 2407.00023, section 3.2): exploit caches or explore by load.

Where more of the prompt is cached than not, the engine with the longest match, unless its load is too far above the
lightest's; else the one with the least load, this prompt's own prefill included. Load is the engine time of what was
sent there in the last three minutes. Left out: what a prompt would evict, replicas of a prefix that gets too popular,
and the engines' own order. The threshold of imbalance is ours.
"""

from collections import deque

from benchmarks.routing.blocks import BlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World

_WINDOW_SECONDS = 180.0
_IMBALANCE = 2.0


class Preble(EagerRule):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        model = world.engines[0].model
        self._model = model
        self._index = BlockMap(len(world.engines), model.kv_capacity_tokens // world.block_tokens)
        self._load = [0.0] * len(world.engines)  # seconds
        self._sent: deque[tuple[float, int, float]] = deque()  # when, where, seconds
        self._num_output_tokens = self._num_finished = 0

    def choose(self, job: Job, now: float) -> int:
        self._forget(now)
        depths = self._index.depths(job.blocks)
        engine = self._choose(job, depths)
        self._index.insert(engine, job.blocks)
        seconds = self._prefill_seconds(job, depths.get(engine, 0)) + self._decode_seconds(job)
        self._load[engine] += seconds
        self._sent.append((now, engine, seconds))
        return engine

    def finish(self, job: Job, now: float) -> None:
        super().finish(job, now)
        self._num_output_tokens += job.num_output_tokens
        self._num_finished += 1

    def _choose(self, job: Job, depths: dict[int, int]) -> int:
        deepest = max(depths.values(), default=0)
        if 2 * deepest * self.world.block_tokens <= job.num_input_tokens:
            costs = [load + self._prefill_seconds(job, depths.get(engine, 0)) for engine, load in enumerate(self._load)]
            return costs.index(min(costs))
        holder = min((engine for engine, depth in depths.items() if depth == deepest), key=self._load.__getitem__)
        lightest = self._load.index(min(self._load))
        return holder if self._load[holder] <= _IMBALANCE * self._load[lightest] else lightest

    def _forget(self, now: float) -> None:
        while self._sent and self._sent[0][0] < now - _WINDOW_SECONDS:
            _, engine, seconds = self._sent.popleft()
            self._load[engine] -= seconds

    def _prefill_seconds(self, job: Job, depth: int) -> float:
        num_cached_tokens = job.tokens_of(depth, self.world.block_tokens)
        return self._model.prefill_seconds(job.num_input_tokens - num_cached_tokens, num_cached_tokens)

    def _decode_seconds(self, job: Job) -> float:
        """Engine time that reading its KV takes, of as many steps as requests had on average."""
        num_steps = self._num_output_tokens / max(self._num_finished, 1)
        return num_steps * job.num_input_tokens * self._model.decode_seconds_per_kv_token
