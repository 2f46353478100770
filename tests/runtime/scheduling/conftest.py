"""A scheduler with a device that is pure arithmetic: the token after position p of a request is a function of p."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvasir_runtime.engine.messages import AddRequest, SamplingParams, TokenLogprobs
from kvasir_runtime.kv_cache.block_pool import BlockPool
from kvasir_runtime.kv_cache.prefix_cache import PrefixCache
from kvasir_runtime.scheduling.batch import BatchOutput, ScheduledBatch
from kvasir_runtime.scheduling.policies import PolicyName, waiting_queue
from kvasir_runtime.scheduling.request import request_from
from kvasir_runtime.scheduling.scheduler import AddressedOutput, Scheduler, SchedulerLimits

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


def next_token(token_ids: list[int]) -> int:
    """A chain that depends on everything before it, so that a lost or doubled token shows."""
    return (sum(token_ids) * 31 + len(token_ids)) % 997


class Rank:
    """Keeps requests by differences only, as a real rank does, and checks every share against what it holds."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}

    def run(self, batch: ScheduledBatch) -> BatchOutput:
        for request_id in batch.released_request_ids:
            del self.tokens[request_id], self.blocks[request_id]
        for new in batch.new_requests:
            self.tokens[new.request_id], self.blocks[new.request_id] = list(new.token_ids), []
        sampled = [self._run_share(share) for share in batch.requests]
        assert sum(share.num_new_tokens for share in batch.requests) == batch.num_tokens
        tokens = [token for token in sampled if token is not None]
        return BatchOutput(tokens, [TokenLogprobs([token], [0.0], 1) for token in tokens])

    def _run_share(self, share) -> int | None:
        tokens, blocks = self.tokens[share.request_id], self.blocks[share.request_id]
        blocks.extend(share.new_block_ids)
        end = share.num_computed_tokens + share.num_new_tokens
        assert end <= len(tokens), "computed a token that nobody knows"
        assert len(blocks) == -(-end // BLOCK_SIZE), "blocks fit the tokens"
        assert len(set(blocks)) == len(blocks)
        assert share.samples == (end == len(tokens))
        if share.samples:
            tokens.append(next_token(tokens))
            return tokens[-1]
        return None


@dataclass
class Engine:
    """Scheduler and rank, stepped by hand; `ahead` plans each step before the last one's results are known."""

    scheduler: Scheduler
    pool: BlockPool
    prefix_cache: PrefixCache
    ahead: bool
    rank: Rank
    pending: tuple[ScheduledBatch, BatchOutput] | None = None
    num_added: int = 0
    arrive_together: bool = False

    def add(self, prompt: list[int], *, request_id: str | None = None, max_tokens: int = 8, tenant: str = "",
            priority: int = 0, **sampling: object) -> str:  # fmt: skip
        self.num_added += 1
        request_id = request_id or f"request-{self.num_added}"
        message = AddRequest(
            request_id=request_id, api_index=0, prompt_token_ids=prompt,
            arrival_time=0.0 if self.arrive_together else float(self.num_added),
            sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling), tenant=tenant, priority=priority,
        )  # fmt: skip
        self.scheduler.add(request_from(message, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE))
        return request_id

    def step(self) -> tuple[ScheduledBatch | None, list[AddressedOutput]]:
        batch = self.scheduler.schedule()
        current = (batch, self.rank.run(batch)) if batch else None
        if not self.ahead:
            return batch, self.scheduler.update(*current) if current else []
        finished, self.pending = self.pending, current
        return batch, self.scheduler.update(*finished) if finished else []

    def run(self) -> dict[str, list[int]]:
        """Until every request has ended; request id -> output tokens."""
        tokens: dict[str, list[int]] = {}
        for _ in range(2000):
            if not self.scheduler.has_requests:
                return tokens
            for addressed in self.step()[1]:
                tokens.setdefault(addressed.output.request_id, []).extend(addressed.output.new_token_ids)
        raise AssertionError("requests never ended")


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    def make(
        *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, chunked: bool = True, cache: bool = True,
        policy: PolicyName = "fcfs", ahead: bool = False,
    ) -> Engine:  # fmt: skip
        pool = BlockPool(num_blocks)
        prefix_cache = PrefixCache(pool, enabled=cache)
        limits = SchedulerLimits(max_num_seqs, budget, chunked)
        scheduler = Scheduler(limits, pool, prefix_cache, waiting_queue(policy))
        return Engine(scheduler, pool, prefix_cache, ahead, Rank())

    return make
