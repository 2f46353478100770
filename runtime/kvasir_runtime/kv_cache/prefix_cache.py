"""Finds the blocks that already hold the beginning of a request's tokens, and offers its full blocks to others.

Only full blocks are shared. A block may be found before its content is computed, because steps run in order and every
layer writes the step's keys and values before it reads any: whoever finds it reads after it was written.
"""

from collections.abc import Sequence

from kvasir_runtime.kv_cache.block_pool import Block, BlockPool
from kvasir_runtime.kv_cache.block_table import BlockTable


class PrefixCache:
    """Counters are in tokens and only grow."""

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled
        self.num_queries = 0
        self.num_hits = 0

    def match(self, token_ids: Sequence[int], table: BlockTable) -> list[Block]:
        """The longest chain of findable blocks, without taking references.

        At least one token is left to compute, since the next token is sampled from its logits.
        """
        matched: list[Block] = []
        if self._enabled:
            for index in range((len(token_ids) - 1) // table.block_size):
                block = self._pool.find(table.hash_of(token_ids, index))
                if block is None:
                    break
                matched.append(block)
        return matched

    def count(self, num_queries: int, num_hits: int) -> None:
        """Record the lookup of an admitted request."""
        self.num_queries += num_queries
        self.num_hits += num_hits

    def store(self, token_ids: Sequence[int], num_computed_tokens: int, table: BlockTable) -> None:
        """Make findable every block whose tokens are all known, and computed or in a step under way."""
        if not self._enabled:
            return
        num_full = min(len(token_ids), num_computed_tokens) // table.block_size
        for index in range(table.num_stored, num_full):
            self._pool.remember(table.blocks[index], table.hash_of(token_ids, index))
        table.num_stored = max(table.num_stored, num_full)
