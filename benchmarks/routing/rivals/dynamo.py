"""Dynamo's KV router: KV events tell what is cached, and replicas of the router share what is active.

`linear`: prefill still to be done there with this prompt's, plus blocks in decode. `lmetric`: the product of both.
"""

from benchmarks.routing.blocks import LateBlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import EagerRule, World


class Active:
    """What all of its router's replicas have in flight, in tokens by engine."""

    def __init__(self, num_engines: int) -> None:
        self.prefill = [0.0] * num_engines
        self.decode = [0.0] * num_engines


class Dynamo(EagerRule):
    def __init__(self, world: World, heard: LateBlockMap, active: Active, *, is_product: bool) -> None:
        super().__init__(world)
        self._heard = heard
        self._active = active
        self._is_product = is_product
        self._uncached: dict[int, int] = {}  # by the request's number, until its first token

    def choose(self, job: Job, now: float) -> int:
        self._heard.hear(now)
        depths = self._heard.depths(job.blocks)
        active, num_tokens, block_tokens = self._active, job.num_input_tokens, self.world.block_tokens
        prefills = [prefill + num_tokens for prefill in active.prefill]
        for engine, depth in depths.items():
            prefills[engine] = max(prefills[engine] - depth * block_tokens, 0)
        if self._is_product:
            costs = [
                prefill * (decode / block_tokens + 1) for prefill, decode in zip(prefills, active.decode, strict=True)
            ]
        else:
            costs = [prefill + decode + num_tokens for prefill, decode in zip(prefills, active.decode, strict=True)]
        lowest = min(costs)
        engine = self.world.source.choice([engine for engine, cost in enumerate(costs) if cost == lowest])
        self._uncached[job.number] = max(num_tokens - depths.get(engine, 0) * block_tokens, 0)
        active.prefill[engine] += self._uncached[job.number]
        active.decode[engine] += num_tokens
        return engine

    def first_token(self, job: Job, now: float) -> None:
        self._active.prefill[job.engine] -= self._uncached.pop(job.number)

    def finish(self, job: Job, now: float) -> None:
        super().finish(job, now)
        self._active.decode[job.engine] -= job.num_input_tokens
