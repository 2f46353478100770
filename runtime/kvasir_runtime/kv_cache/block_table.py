"""The blocks that one request holds, in the order of its tokens, and their hashes as far as they are known."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir_runtime.kv_cache.block_hash import hash_block
from kvasir_runtime.kv_cache.block_pool import Block


@dataclass(slots=True, eq=False)
class BlockTable:
    block_size: int
    extra_keys: tuple[bytes, ...] = ()
    """Part of the first block's hash: prefixes are shared only under equal keys."""
    blocks: list[Block] = field(default_factory=list)
    num_sent: int = 0
    """Blocks that the ranks know of."""
    num_stored: int = 0
    """Blocks that were offered to the prefix cache."""
    _hashes: list[bytes] = field(default_factory=list)

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to add before `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))

    def take_unsent(self) -> tuple[int, ...]:
        """Ids of the blocks that were added since the last call."""
        unsent = tuple(block.block_id for block in self.blocks[self.num_sent :])
        self.num_sent = len(self.blocks)
        return unsent

    def take_all(self) -> list[Block]:
        """Give up every block; the hashes stay, since the tokens do."""
        blocks, self.blocks = self.blocks, []
        self.num_sent = self.num_stored = 0
        return blocks

    def hash_of(self, token_ids: Sequence[int], index: int) -> bytes:
        """Digest of block `index`, whose tokens must all be known. Computed once, in order."""
        while len(self._hashes) <= index:
            position = len(self._hashes)
            first = position * self.block_size
            parent = self._hashes[-1] if position else None
            extra_keys = () if position else self.extra_keys
            self._hashes.append(hash_block(parent, token_ids[first : first + self.block_size], extra_keys))
        return self._hashes[index]
