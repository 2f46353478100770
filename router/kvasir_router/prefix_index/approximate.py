"""A guess at each endpoint's prefix cache from what was sent there: chained block hashes with a bound and a lifetime.

Invariant: on one endpoint a block was never used later than its parent, because a chain is touched from its end to its
start. So eviction takes leaves first, and how deep a chain is held can be found by bisection. It reads no clock.
"""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

# 131,072 tokens at the default block size: longer prompts differ long before.
MAX_BLOCKS_PER_PROMPT = 2048


def hash_seed(*parts: bytes) -> int:
    """What the first block is chained to; parts are told apart by their lengths."""
    seed = 0
    for part in parts:
        seed = xxh3_64_intdigest(part, seed=seed ^ len(part))
    return seed


def hash_blocks(prompt: bytes, block_bytes: int, seed: int) -> tuple[int, ...]:
    """One 64-bit hash for each full block, chained to all blocks before it."""
    num_blocks = min(len(prompt) // block_bytes, MAX_BLOCKS_PER_PROMPT)
    view = memoryview(prompt)
    hashes = []
    for start in range(0, num_blocks * block_bytes, block_bytes):
        seed = xxh3_64_intdigest(view[start : start + block_bytes], seed=seed)
        hashes.append(seed)
    return tuple(hashes)


class ApproximatePrefixIndex:
    """Per endpoint an LRU of block hashes. Times are seconds of any steady clock, given by the caller."""

    def __init__(self, max_blocks_per_endpoint: int, ttl_seconds: float) -> None:
        self._max_blocks = max_blocks_per_endpoint
        self._ttl_seconds = ttl_seconds
        self._last_used: dict[str, OrderedDict[int, float]] = {}  # endpoint -> block hash -> time, least recent first

    def insert(
        self, endpoint: str, block_hashes: Sequence[int], now: float, capacity_blocks: int | None = None
    ) -> None:
        """Marks a prompt's blocks as held; `capacity_blocks` is what the endpoint's KV cache can hold, when known."""
        held = self._last_used.setdefault(endpoint, OrderedDict())
        for block_hash in reversed(block_hashes):
            held[block_hash] = now
            held.move_to_end(block_hash)
        limit = self._max_blocks if capacity_blocks is None else min(self._max_blocks, capacity_blocks)
        while len(held) > limit:
            held.popitem(last=False)

    def num_matched_blocks(self, endpoint: str, block_hashes: Sequence[int], now: float) -> int:
        """How many of the prompt's leading blocks the endpoint holds; O(log n)."""
        held = self._last_used.get(endpoint)
        if not held:
            return 0
        oldest = now - self._ttl_seconds
        low, high = 0, len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            if held.get(block_hashes[middle], oldest) > oldest:
                low = middle + 1
            else:
                high = middle
        return low

    def expire(self, now: float) -> None:
        """Frees the memory of blocks past their lifetime."""
        for held in self._last_used.values():
            while held and next(iter(held.values())) <= now - self._ttl_seconds:
                held.popitem(last=False)

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone, and its cache with it."""
        self._last_used.pop(endpoint, None)

    def num_blocks(self, endpoint: str) -> int:
        return len(self._last_used.get(endpoint, ()))
