"""A guess at each endpoint's prefix cache from what was sent there: chained block hashes with bounds and a lifetime.

One map tells the holders of each block, so that a prompt is matched against all endpoints at once; per endpoint, the
dispatches in order of time say what to forget first. Invariant: an endpoint that holds a block holds all before it,
because a dispatch is forgotten from its end. So holders get fewer along a prompt, and where they do is found by
bisection. It reads no clock.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from math import inf
from typing import cast

from xxhash import xxh3_64_intdigest

from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.block_keys import TOKEN_BYTES, chained_hashes
from kvasir_router.prefix_index.index import Held, PrefixKey, SharedPrefix

# A million tokens at the default block size.
MAX_BLOCKS_PER_PROMPT = 16384
# A thread that hashes takes the interpreter from the event loop for up to 5 ms at a time: it is for what takes longer.
THREAD_BYTES = 2 * 2**20
_BITS = bytes.maketrans(b"01", b"\0\1")
# What one block held by one endpoint takes: entries of two dictionaries, a hash, its place in a dispatch. Measured.
BYTES_PER_BLOCK = 200


class BlockHashes(SharedPrefix, frozen=True):
    """The key of this index."""

    num_tokens: int  # estimated for text, exact for token ids
    hashes: tuple[int, ...]  # chained: one for every full block of the prompt

    def beginning(self, num_tokens: int) -> int | None:
        depth = -(-num_tokens * len(self.hashes) // self.num_tokens)  # rounded up: the last block may be partly filled
        return self.hashes[depth - 1] if 0 < depth <= len(self.hashes) else None


@dataclass(slots=True)
class _Dispatch:
    number: int
    at: float
    hashes: tuple[int, ...]
    num_known: int  # leading blocks that the endpoint held before
    num_left: int  # leading blocks that were not forgotten yet


class _Holder:
    """One endpoint's share of the index. `bit` stands for it in the map of holders."""

    __slots__ = ("bit", "dispatches", "last_dispatch", "num_listed", "url")

    def __init__(self, url: str, bit: int) -> None:
        self.url = url
        self.bit = bit
        self.last_dispatch: dict[int, int] = {}  # block hash -> number of the last dispatch with it
        self.dispatches: deque[_Dispatch] = deque()
        self.num_listed = 0  # blocks of all dispatches, with those that later ones repeat


def hash_blocks(content: bytes, block_bytes: int, seed: bytes) -> tuple[int, ...]:
    return chained_hashes(xxh3_64_intdigest(seed), content[: MAX_BLOCKS_PER_PROMPT * block_bytes], block_bytes)


class PrefixMemory:
    """Of all indexes of a process together: each endpoint that holds anything has an equal part of it."""

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        self._max_blocks = max_bytes // BYTES_PER_BLOCK
        self.num_endpoints = 0

    @property
    def max_blocks_per_endpoint(self) -> int:
        return self._max_blocks // max(self.num_endpoints, 1)


class ApproximatePrefixIndex:
    """Bounded per endpoint, and by `memory`, which indexes may share."""

    def __init__(
        self,
        max_blocks_per_endpoint: int,
        ttl_seconds: float,
        block_tokens: int,
        bytes_per_token: float,
        memory: PrefixMemory | None = None,
    ) -> None:
        self._max_blocks = max_blocks_per_endpoint
        self._memory = memory or PrefixMemory()
        self._ttl_seconds = ttl_seconds
        self._block_tokens = block_tokens
        self._bytes_per_token = bytes_per_token
        self._holders: dict[str, _Holder] = {}
        self._urls: list[str | None] = []  # by the number of their bit; None: free
        self._holding: dict[int, int] = {}  # block hash -> bits of the endpoints that hold it
        self._num_dispatches = 0
        self._expires_at = inf  # the oldest dispatch

    def of_the_last(self, seconds: float) -> "ApproximatePrefixIndex":
        """Another one with the same keys, which forgets sooner."""
        return ApproximatePrefixIndex(self._max_blocks, seconds, self._block_tokens, self._bytes_per_token)

    async def key(self, prompt: Prompt) -> BlockHashes:
        bytes_per_token = TOKEN_BYTES if prompt.is_token_ids else self._bytes_per_token
        block_bytes = int(self._block_tokens * bytes_per_token)
        if len(prompt.content) > THREAD_BYTES:
            hashes = await asyncio.to_thread(hash_blocks, prompt.content, block_bytes, prompt.seed)
        else:
            hashes = hash_blocks(prompt.content, block_bytes, prompt.seed)
        return BlockHashes(int(len(prompt.content) / bytes_per_token), hashes)

    def match(self, key: PrefixKey, now: float) -> Mapping[str, int]:
        """O(log blocks) for each depth to which some endpoint holds the prompt, however many endpoints there are."""
        if now >= self._expires_at:
            self.expire(now)
        hashes = cast(BlockHashes, key).hashes
        held: dict[str, int] = {}
        depth, holders = 0, self._held_at(hashes, 0)
        while holders:
            depth = self._last_depth_of_all(hashes, holders, depth)
            remaining = self._held_at(hashes, depth)
            held.update(zip(self._urls_of(holders & ~remaining), repeat(depth * self._block_tokens)))
            holders = remaining
        return held

    def written(self, key: PrefixKey) -> Mapping[str, Held]:
        """Engines have said nothing."""
        return {}

    def insert(self, url: str, key: PrefixKey, now: float, capacity_tokens: int | None) -> None:
        hashes = cast(BlockHashes, key).hashes
        if not hashes:
            return
        holder = self._holders.get(url) or self._new_holder(url)
        num_known = self._num_held(holder, hashes)
        self._num_dispatches += 1
        self._hold(hashes[num_known:], holder.bit)
        holder.last_dispatch.update(zip(hashes, repeat(self._num_dispatches)))
        holder.dispatches.append(_Dispatch(self._num_dispatches, now, hashes, num_known, len(hashes)))
        holder.num_listed += len(hashes)
        self._expires_at = min(self._expires_at, now + self._ttl_seconds)
        self._shrink(holder, self._limit(capacity_tokens))

    def withdraw(self, url: str, key: PrefixKey | None = None) -> None:
        holder = self._holders.get(url)
        if holder is None:
            return
        if key is None:
            self._forget_holder(holder)
            return
        hashes = cast(BlockHashes, key).hashes
        failed = next((dispatch for dispatch in reversed(holder.dispatches) if dispatch.hashes is hashes), None)
        if failed is not None:
            self._shorten(holder, failed, failed.num_known)

    def expire(self, now: float) -> None:
        oldest = now - self._ttl_seconds
        self._expires_at = inf
        for holder in tuple(self._holders.values()):
            while holder.dispatches and holder.dispatches[0].at <= oldest:
                self._drop_oldest(holder)
            self._shrink(holder, self._limit(None))  # others may have come since its last dispatch
            if holder.dispatches:
                self._expires_at = min(self._expires_at, holder.dispatches[0].at + self._ttl_seconds)
            else:
                self._forget_holder(holder)

    def num_blocks(self, url: str) -> int:
        holder = self._holders.get(url)
        return 0 if holder is None else len(holder.last_dispatch)

    def _held_at(self, hashes: Sequence[int], depth: int) -> int:
        """Bits of those that hold the prompt deeper than `depth` blocks."""
        return self._holding.get(hashes[depth], 0) if depth < len(hashes) else 0

    def _last_depth_of_all(self, hashes: Sequence[int], holders: int, low: int) -> int:
        """How deep all of `holders`, who hold block `low`, still hold the prompt: at least `low + 1` blocks."""
        low, high = low + 1, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self._holding.get(hashes[middle], 0) & holders == holders:
                low = middle + 1
            else:
                high = middle
        return low

    def _urls_of(self, bits: int) -> Iterator[str]:
        """Without a step of Python's for each bit: a system prompt's blocks have as many holders as there are."""
        is_set = f"{bits:b}"[::-1].encode().translate(_BITS)
        return filter(None, compress(self._urls, is_set))

    def _new_holder(self, url: str) -> _Holder:
        number = next((number for number, known in enumerate(self._urls) if known is None), len(self._urls))
        self._urls[number : number + 1] = [url]
        holder = self._holders[url] = _Holder(url, 1 << number)
        self._memory.num_endpoints += 1
        return holder

    def _num_held(self, holder: _Holder, hashes: Sequence[int]) -> int:
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in holder.last_dispatch:
                low = middle + 1
            else:
                high = middle
        return low

    def _limit(self, capacity_tokens: int | None) -> int:
        limit = min(self._max_blocks, self._memory.max_blocks_per_endpoint)
        return limit if capacity_tokens is None else min(limit, capacity_tokens // self._block_tokens)

    def _shrink(self, holder: _Holder, limit: int) -> None:
        """Also where blocks are few, but named by many dispatches: those take memory too."""
        while len(holder.last_dispatch) > limit:
            oldest = holder.dispatches[0]
            self._shorten(holder, oldest, oldest.num_left - (len(holder.last_dispatch) - limit))
            if oldest.num_left <= 0:
                self._drop_oldest(holder)
        while holder.num_listed > 4 * limit and len(holder.dispatches) > 1:
            self._drop_oldest(holder)

    def _drop_oldest(self, holder: _Holder) -> None:
        oldest = holder.dispatches.popleft()
        self._shorten(holder, oldest, 0)

    def _shorten(self, holder: _Holder, dispatch: _Dispatch, num_left: int) -> None:
        """Forgets its blocks from the end, those apart that a later dispatch has used."""
        num_left = max(num_left, 0)
        forgotten = dispatch.hashes[_num_used_later(holder, dispatch, num_left) : dispatch.num_left]
        for _ in map(holder.last_dispatch.pop, forgotten, repeat(None)):
            pass
        self._release(forgotten, holder.bit)
        holder.num_listed -= max(dispatch.num_left - num_left, 0)
        dispatch.num_left = min(dispatch.num_left, num_left)

    # A long prompt has thousands of blocks, most of which one endpoint alone holds: no step of Python's for each.

    def _hold(self, hashes: Sequence[int], bit: int) -> None:
        others = list(map(self._holding.get, hashes))
        self._holding.update(zip(hashes, repeat(bit)))
        if others.count(None) < len(others):
            for block_hash, bits in zip(hashes, others, strict=True):
                self._holding[block_hash] |= bits or 0

    def _release(self, hashes: Sequence[int], bit: int) -> None:
        holders = list(map(self._holding.pop, hashes, repeat(bit)))
        if holders.count(bit) < len(holders):
            for block_hash, bits in zip(hashes, holders, strict=True):
                if bits != bit:
                    self._holding[block_hash] = bits & ~bit

    def _forget_holder(self, holder: _Holder) -> None:
        while holder.dispatches:
            self._drop_oldest(holder)
        del self._holders[holder.url]
        self._memory.num_endpoints -= 1
        self._urls[holder.bit.bit_length() - 1] = None


def _num_used_later(holder: _Holder, dispatch: _Dispatch, low: int) -> int:
    """How many of its leading blocks, at least `low`, a later dispatch has used: prompts share beginnings only."""
    high = max(dispatch.num_left, low)
    while low < high:
        middle = (low + high) // 2
        if holder.last_dispatch.get(dispatch.hashes[middle]) == dispatch.number:
            high = middle
        else:
            low = middle + 1
    return low
