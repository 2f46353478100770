"""Blocks that came from another engine for requests that wait for their turn.

They are in the prefix cache like any others, and held besides, so that they are still there when the turn comes. They
are given up, the youngest first, before anything that runs or comes before them goes without pages: they are cached
then, and may be computed again. After them goes what is kept for other engines of requests that wait.
"""

from collections.abc import Callable

from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.sequence_blocks import SequenceBlocks


class LandedBlocks:
    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._held: dict[str, SequenceBlocks] = {}
        self.give_up_offer: Callable[[str | None], bool] = lambda keep: False
        """Does what `give_up_one` does, for blocks that are kept for other engines."""

    def hold(self, request_id: str, blocks: SequenceBlocks) -> None:
        self._held[request_id] = blocks

    def has_others(self, request_id: str) -> bool:
        """Whether anything is held for another request than this one."""
        return len(self._held) > (request_id in self._held)

    def let_go(self, request_id: str) -> None:
        """The request runs and holds them itself, or has ended; most requests never had any."""
        blocks = self._held.pop(request_id, None)
        if blocks is not None:
            self._kv.release(blocks)

    def give_up_one(self, keep: str | None = None) -> bool:
        """Let go of what the youngest request but `keep` has; whether there was one."""
        youngest = next((request_id for request_id in reversed(self._held) if request_id != keep), None)
        if youngest is None:
            return self.give_up_offer(keep)
        self.let_go(youngest)
        return True
