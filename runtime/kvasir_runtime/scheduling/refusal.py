"""Remembers that the sequence that comes first was refused for want of pages, so that its whole prompt is not matched
against the prefix cache in every step until there are enough.

It is looked at again when what it needed is free, when it may need less because the block behind its cached beginning
can be found now, when pages have landed since for those behind it, which it may have, when another comes first, and
whenever nobody runs. What else may help it is missed: of a KV group with a window the longer beginning may show further
on, and cached blocks that it counted as free may be in others' use. Then it waits for some pages more than it needs, or
until nobody runs, which comes to pass: those that run wait for nobody behind them, and nobody is admitted before it.
"""

from dataclasses import dataclass

from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.landed_blocks import LandedBlocks
from kvasir_runtime.scheduling.request import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    sequence: Sequence
    num_pages: int
    """That it needed to be free."""
    next_hash: list[bytes]
    """Of the block behind its cached beginning; none where it may find no more."""

    def still_holds(self, sequence: Sequence, kv: KvCache, landed: LandedBlocks) -> bool:
        """Whether there is no use in matching the prompt of the sequence that comes first, while others run."""
        return (
            sequence is self.sequence
            and kv.pool.num_free < self.num_pages
            and not kv.num_cached(self.next_hash)
            and not landed.has_others(sequence.request.request_id)
        )
