"""The blocks that one sequence holds, a table for each KV group, and the hashes of its full blocks as far as known.

All tables count blocks alike: entry i of every table holds tokens [i * block_size, (i + 1) * block_size). An entry is
None where its block lies behind what the group's tokens see.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.block_hash import hash_blocks
from kvasir_runtime.kv_cache.block_pool import Block

Tokens = Sequence[int] | NDArray[np.int32]


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    block_size: int
    tables: tuple[list[Block | None], ...]
    num_passed: list[int]
    """Of each group: entries at the beginning that are behind what is seen."""
    extra_keys: tuple[bytes, ...] = ()
    """Part of the first block's hash: prefixes are shared only under equal keys."""
    num_offered: int = 0
    """Blocks that were offered to the prefix cache."""
    hashes: list[bytes] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.tables[0]) * self.block_size

    @property
    def next_boundary(self) -> int:
        """Tokens at which the next block to offer is full."""
        return (self.num_offered + 1) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Entries to add to each table before `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.tables[0]))

    def take_all(self) -> list[Block]:
        """Give up every block; the hashes stay, since the tokens do."""
        blocks = [block for table in self.tables for block in table if block is not None]
        for table in self.tables:
            table.clear()
        self.num_offered = 0
        self.num_passed[:] = [0] * len(self.num_passed)
        return blocks

    def hash_of(self, token_ids: Tokens, index: int) -> bytes:
        """Hash of block `index`, whose tokens must all be known. Computed once, in order."""
        hashes, size = self.hashes, self.block_size
        if (first := len(hashes)) <= index:
            parent, extra_keys = (hashes[-1], ()) if hashes else (None, self.extra_keys)
            hashes += hash_blocks(parent, token_ids[first * size : (index + 1) * size], size, extra_keys)
        return hashes[index]
