"""Blocks kept for requests that wait, and for other engines: nobody runs on them, so they are given up first.

What arrived from another engine for a request that waits is in the prefix cache like any other block, and held besides,
so that it is still there when the turn comes; given up it may be computed again. What is kept for an engine that is to
read it is given up afterwards, and only while its prompt is neither running nor complete.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir_runtime.kv_cache.blocks import Block, SequenceBlocks
from kvasir_runtime.kv_cache.kv_cache import KvCache


@dataclass(slots=True, eq=False)
class LentBlocks:
    """Kept for another engine, as they are written, until it has read them."""

    blocks: list[Block] = field(default_factory=list)
    is_complete: bool = False
    """Whether these are all: then its reading them ends it, and nothing else."""
    was_given_up: bool = False


class KeptBlocks:
    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self.arrived: dict[str, SequenceBlocks] = {}
        """Of requests that wait; most never have any."""
        self._lent: dict[str, LentBlocks] = {}

    def has_others(self, request_id: str) -> bool:
        """Whether anything is held for another request than this one."""
        return len(self.arrived) > (request_id in self.arrived)

    def release(self, request_id: str) -> None:
        """The request, for which some have arrived, runs and holds them itself, or has ended."""
        self._kv.release(self.arrived.pop(request_id))

    def lend(self, key: str) -> LentBlocks:
        """Where blocks are put that another engine is to read, until `end_loan`."""
        lent = self._lent[key] = LentBlocks()
        return lent

    def end_loan(self, key: str) -> None:
        self._kv.pool.release(self._lent.pop(key).blocks)

    def give_up_one(self, keep: str | None, is_running: Callable[[str], bool]) -> bool:
        """Release what the youngest request but `keep` has; whether there was one. Nobody has all blocks of a prompt
        that is not complete, and so nobody takes for good what he reads of them from now on."""
        youngest = next((request_id for request_id in reversed(self.arrived) if request_id != keep), None)
        if youngest is not None:
            self.release(youngest)
            return True
        for key, lent in reversed(self._lent.items()):
            if lent.blocks and not lent.is_complete and key != keep and not is_running(key):
                self._kv.pool.release(lent.blocks)
                lent.blocks.clear()
                lent.was_given_up = True
                return True
        return False
