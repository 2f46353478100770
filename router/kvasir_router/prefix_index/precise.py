"""Which endpoint holds which blocks, as the engines' own events say.

One map from a block's key to the caches that hold it, as bits of a number: a prompt is matched against all of them by
one walk over its blocks. An endpoint has a cache for each of its data-parallel ranks, and holds as much of a prompt as
the one that holds most of it. A cache that is void gets another bit, so that its blocks need not be walked at that
moment; they are freed little by little. It reads no clock and knows no socket.

Invariant: an endpoint is said to hold a block only if its events said so last, or did before messages were lost (for
DOUBT_SECONDS).
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir_router.prefix_index.block_keys import block_keys, root_key
from kvasir_router.prefix_index.index import Held
from kvasir_router.prefix_index.kv_events import BlockRemoved, BlockStored, Digest, Event

DOUBT_SECONDS = 120.0
"""So long blocks are believed that were held when messages were lost for good, unless an event names them again."""
DEFAULT_BLOCK_SIZE = 16
"""vLLM's and ours, until an engine's events tell."""
_NUM_FREED_AN_EVENT = 32
_NUM_FREED_A_CALL = 20_000

Chains = Mapping[int, Sequence[int]]
"""Block size in tokens -> keys of a prompt's full blocks."""


@dataclass(slots=True)
class BlockBudget:
    """Of all indexes of a process together."""

    max_blocks: int
    num_held: int = 0


@dataclass(slots=True, eq=False)
class _Cache:
    """Of one data-parallel rank of an endpoint; most have but rank 0."""

    url: str
    rank: int
    bit: int
    is_complete: bool  # it holds nothing that is not known here
    blocks: dict[Digest, int] = field(default_factory=dict)  # -> key
    doubted: dict[Digest, int] = field(default_factory=dict)  # held when messages were lost
    doubted_until: float = 0.0
    block_size: int | None = None
    group: int | None = None  # of KV layers, the one that is followed: they are evicted alike
    is_window: bool | None = None  # that group's layers see the last tokens only; None: no event yet

    def key_of(self, digest: Digest) -> int | None:
        key = self.blocks.get(digest)
        return self.doubted.get(digest) if key is None else key

    def pop(self, digest: Digest) -> int | None:
        key = self.blocks.pop(digest, None)
        return self.doubted.pop(digest, None) if key is None else key


@dataclass(slots=True, eq=False)
class _Void:
    """Blocks that nobody believes, though their bit is still in the map."""

    bit: int
    blocks: list[dict[Digest, int]]
    lives_on: _Cache | None = None  # with the same bit: what it holds by now stays


class PreciseIndex:
    """Times are seconds of any steady clock, given by the caller."""

    def __init__(self, budget: BlockBudget) -> None:
        """Blocks beyond the budget are not believed, and whoever holds them is not known completely."""
        self._budget = budget
        self._holders: dict[int, int] = {}  # key -> bits of the caches
        self._endpoints: dict[str, dict[int, _Cache]] = {}  # by rank
        self._by_bit: dict[int, _Cache] = {}
        self._live: dict[int, int] = {}  # block size -> bits
        self._usual_block_size = DEFAULT_BLOCK_SIZE
        self._voids: deque[_Void] = deque()
        self._free_bits: list[int] = []
        self.num_bits = 0  # as many caches as there ever were at once, those not freed yet included
        self.num_held = 0  # of all caches, a block held twice counted twice, those not freed yet included
        self.num_orphans = 0  # stored after a block that is not known: they match nothing
        self.num_refused = 0  # beyond the budget

    def block_sizes(self) -> frozenset[int]:
        """In which prompts are to be cut."""
        return frozenset(self._live)

    def is_held(self, key: int) -> bool:
        """Somebody has the block, by events. May be asked by another thread."""
        return key in self._holders

    def num_blocks(self, url: str) -> int:
        return sum(len(cache.blocks) + len(cache.doubted) for cache in self._caches(url))

    def is_complete(self, url: str) -> bool:
        """The endpoint's caches hold nothing that is not known here."""
        caches = self._caches(url)
        return bool(caches) and all(cache.is_complete for cache in caches)

    def reset(self, url: str, *, is_complete: bool, rank: int = 0) -> None:
        """The rank is new, or nothing that was known of its cache holds. Takes no time for each block."""
        self.forget(url, rank)
        cache = _Cache(url, rank, self._new_bit(), is_complete)
        self._endpoints.setdefault(url, {})[rank] = self._by_bit[cache.bit] = cache
        self._find_live()

    def forget(self, url: str, rank: int = 0) -> None:
        caches = self._endpoints.get(url, {})
        cache = caches.pop(rank, None)
        if cache is not None:
            del self._by_bit[cache.bit]
            self._voids.append(_Void(cache.bit, [cache.blocks, cache.doubted]))
            self._find_live()
        if not caches:
            self._endpoints.pop(url, None)

    def doubt(self, url: str, now: float, rank: int = 0) -> None:
        """Messages of the rank were lost for good: blocks may have gone or come unnoticed."""
        cache = self._endpoints[url][rank]
        cache.is_complete = False
        self._end_doubt(cache)
        cache.doubted, cache.blocks = cache.blocks, {}
        cache.doubted_until = now + DOUBT_SECONDS

    def apply(self, url: str, event: Event, rank: int = 0) -> None:
        """One event of a rank that is followed (`reset` once), in the engine's order."""
        cache = self._endpoints[url][rank]
        if isinstance(event, BlockStored):
            self._store(self._following(cache, event), event)
        elif isinstance(event, BlockRemoved):
            self._remove(cache, event)
        else:
            self._clear(cache, is_complete=True)
        self._free(_NUM_FREED_AN_EVENT)

    def match(self, chains: Chains) -> dict[str, Held]:
        """Endpoint url -> leading tokens that one of its ranks holds, the one with the most; only those above 0."""
        matched: dict[str, Held] = {}
        for block_size, live in self._live.items():
            for bit, num_blocks in self._depths(chains.get(block_size, ()), live):
                cache, num_tokens = self._by_bit[bit], num_blocks * block_size
                if num_tokens > (matched[cache.url].num_tokens if cache.url in matched else 0):
                    matched[cache.url] = Held(num_tokens, cache.rank)
        return matched

    def expire(self, now: float) -> None:
        """Ends doubts that are over and frees some memory; to be called about every second."""
        for cache in self._by_bit.values():
            if cache.doubted and cache.doubted_until <= now:
                self._end_doubt(cache)
        self._free(_NUM_FREED_A_CALL)

    def _caches(self, url: str) -> Collection[_Cache]:
        return self._endpoints.get(url, {}).values()

    def _depths(self, chain: Sequence[int], live: int) -> Iterator[tuple[int, int]]:
        """(bit, number of leading blocks held) of each live cache."""
        holders = self._holders
        for depth, key in enumerate(chain):
            held = holders.get(key, 0) & live
            if held != live:
                for bit in _bits(live ^ held):
                    yield bit, depth
                live = held
                if not live:
                    return
        for bit in _bits(live):
            yield bit, len(chain)

    def _following(self, cache: _Cache, event: BlockStored) -> _Cache:
        """Follows one group of layers, with full attention if there is one, in blocks of one size."""
        is_better_group = cache.is_window is None or (cache.is_window and not event.is_window)
        is_same_group = event.group == cache.group and event.is_window == cache.is_window
        if is_better_group or (is_same_group and event.block_size != cache.block_size):
            if cache.is_window is not None:
                cache = self._clear(cache, is_complete=cache.is_complete)
            cache.group, cache.is_window = event.group, event.is_window
            cache.block_size = event.block_size
            self._find_live()
        return cache

    def _store(self, cache: _Cache, event: BlockStored) -> None:
        if event.group != cache.group:
            return
        parent = root_key(event.adapter) if event.parent is None else cache.key_of(event.parent)
        if parent is None:
            self.num_orphans += len(event.digests)
            return
        keys = block_keys(parent, event.tokens, event.block_size, event.extra_keys)
        for digest, key in zip(event.digests, keys, strict=True):
            self._hold(cache, digest, key)

    def _hold(self, cache: _Cache, digest: Digest, key: int) -> None:
        known = cache.pop(digest)
        if known is not None:
            self._release(cache.bit, known)
        if self._budget.num_held >= self._budget.max_blocks:
            self.num_refused += 1
            cache.is_complete = False
            return
        cache.blocks[digest] = key
        self._holders[key] = self._holders.get(key, 0) | cache.bit
        self.num_held += 1
        self._budget.num_held += 1

    def _remove(self, cache: _Cache, event: BlockRemoved) -> None:
        if event.group not in (None, cache.group):
            return
        for digest in event.digests:
            key = cache.pop(digest)
            if key is not None:
                self._release(cache.bit, key)

    def _release(self, bit: int, key: int) -> None:
        self._free_one()
        bits = self._holders.get(key, 0) & ~bit
        if bits:
            self._holders[key] = bits
        else:
            self._holders.pop(key, None)

    def _clear(self, cache: _Cache, *, is_complete: bool) -> _Cache:
        """The cache is empty; the engine cuts blocks as before."""
        self.reset(cache.url, is_complete=is_complete, rank=cache.rank)
        successor = self._endpoints[cache.url][cache.rank]
        successor.block_size = cache.block_size
        successor.group, successor.is_window = cache.group, cache.is_window
        self._find_live()
        return successor

    def _end_doubt(self, cache: _Cache) -> None:
        if cache.doubted:
            self._voids.append(_Void(cache.bit, [cache.doubted], lives_on=cache))
            cache.doubted = {}

    def _free(self, num_blocks: int) -> None:
        while self._voids and num_blocks > 0:
            void = self._voids[0]
            if not void.blocks:
                self._voids.popleft()
                if void.lives_on is None:
                    self._free_bits.append(void.bit)
            elif not void.blocks[-1]:
                void.blocks.pop()
            else:
                digest, key = void.blocks[-1].popitem()
                self._free_block(void, digest, key)
                num_blocks -= 1

    def _free_block(self, void: _Void, digest: Digest, key: int) -> None:
        if void.lives_on is not None and digest in void.lives_on.blocks:
            self._free_one()  # an event has named it since
        else:
            self._release(void.bit, key)

    def _free_one(self) -> None:
        self.num_held -= 1
        self._budget.num_held -= 1

    def _new_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self.num_bits += 1
        return 1 << self.num_bits - 1

    def _find_live(self) -> None:
        known = Counter(cache.block_size for cache in self._by_bit.values() if cache.block_size is not None)
        self._usual_block_size = known.most_common(1)[0][0] if known else DEFAULT_BLOCK_SIZE
        live: dict[int, int] = {}
        for cache in self._by_bit.values():
            block_size = self._block_size_of(cache)
            live[block_size] = live.get(block_size, 0) | cache.bit
        self._live = live

    def _block_size_of(self, cache: _Cache) -> int:
        """That of the others where its own events have not told yet."""
        return self._usual_block_size if cache.block_size is None else cache.block_size


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
