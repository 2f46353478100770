"""Which engine holds which blocks, as rules believe it or engines say it: bits of engines by block."""

from collections import OrderedDict

from benchmarks.routing.engine import CacheUpdate


class BlockMap:
    """`num_blocks` bounds each engine's share, least recently used first; None: as told by updates."""

    def __init__(self, num_engines: int, num_blocks: int | None = None) -> None:
        self._holders: dict[int, int] = {}
        self._num_blocks = num_blocks
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]

    def depths(self, blocks: tuple[int, ...]) -> dict[int, int]:
        """Engine -> how many leading blocks it holds, where any."""
        depths: dict[int, int] = {}
        holders = -1
        for depth, block in enumerate(blocks):
            remaining = holders & self._holders.get(block, 0)
            if remaining != holders:
                _note(depths, holders & ~remaining if holders > 0 else 0, depth)
                holders = remaining
                if not remaining:
                    return depths
        _note(depths, max(holders, 0), len(blocks))
        return depths

    def holds(self, engine: int, block: int) -> bool:
        return bool(self._holders.get(block, 0) >> engine & 1)

    def insert(self, engine: int, blocks: tuple[int, ...]) -> None:
        """They were sent there."""
        bit, holders, used = 1 << engine, self._holders, self._used[engine]
        for block in reversed(blocks):
            holders[block] = holders.get(block, 0) | bit
            used[block] = None
            used.move_to_end(block)
        while self._num_blocks is not None and len(used) > self._num_blocks:
            holders[used.popitem(last=False)[0]] &= ~bit

    def apply(self, update: CacheUpdate) -> None:
        bit, holders = 1 << update.engine, self._holders
        for block in update.stored:
            holders[block] = holders.get(block, 0) | bit
        for block in update.removed:
            if block in holders:
                holders[block] &= ~bit


class LateBlockMap(BlockMap):
    """What engines have said up to `late_seconds` ago; one for all routers, who hear the same."""

    def __init__(self, num_engines: int, updates: list[CacheUpdate], late_seconds: float) -> None:
        super().__init__(num_engines)
        self._updates = updates
        self._late_seconds = late_seconds
        self._num_heard = 0

    def hear(self, now: float) -> None:
        updates, heard = self._updates, self._num_heard
        until = now - self._late_seconds
        while heard < len(updates) and updates[heard].at <= until:
            self.apply(updates[heard])
            heard += 1
        self._num_heard = heard


def _note(depths: dict[int, int], engines: int, depth: int) -> None:
    while engines:
        lowest = engines & -engines
        depths[lowest.bit_length() - 1] = depth
        engines ^= lowest
