"""What the scheduler asks of the KV cache: find a prefix, give a sequence blocks, share them between forks, free them.

One pool serves all KV groups, since their pages are equally large. Only full blocks are findable. A group of
another reach than full needs only the blocks that its next token sees, so a prefix is found where every full group has
all of its blocks and every other group the last few.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvasir_runtime.kv_cache.blocks import Block, BlockPool, SequenceBlocks, Tokens
from kvasir_runtime.kv_cache.events import AnnouncedBlock, KvEventLog
from kvasir_runtime.kv_cache.spec import KvGroup, Reach

TableWrite = tuple[int, int, int]
"""KV group, index in the sequence's table of that group, block id."""
BlockCopy = tuple[int, int]
"""Source and target block id."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached blocks that hold the beginning of a sequence; no reference is taken yet."""

    num_tokens: int
    tables: tuple[list[Block | None], ...]

    @property
    def blocks(self) -> list[Block]:
        return [block for table in self.tables for block in table if block is not None]


class KvCache:
    """Counters are in tokens and only grow."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[KvGroup, ...],
        *,
        enable_prefix_caching: bool,
        event_log: KvEventLog | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, event_log)
        self.block_size = block_size
        self.num_queries = 0
        self.num_hits = 0
        self._reaches = tuple(group.reach for group in groups)
        self._full = [group for group, reach in enumerate(self._reaches) if reach.is_full]
        self._short = [(group, reach) for group, reach in enumerate(self._reaches) if not reach.is_full]
        """Groups of which a token does not see all before it."""
        self.num_tokens = num_tokens_in(num_blocks, block_size, len(groups))
        """That all blocks have room for."""
        self._is_caching = enable_prefix_caching
        self._event_log = event_log

    @property
    def num_groups(self) -> int:
        return len(self._reaches)

    @property
    def num_used_tokens(self) -> int:
        """That the blocks in use have room for."""
        return num_tokens_in(self.pool.num_used, self.block_size, len(self._reaches))

    def empty(self, extra_keys: tuple[bytes, ...] = ()) -> SequenceBlocks:
        """Tables of a sequence that holds nothing yet."""
        return SequenceBlocks(self.block_size, tuple([] for _ in self._reaches), [0] * len(self._reaches), extra_keys)

    def match(self, token_ids: Tokens, blocks: SequenceBlocks) -> Prefix:
        """The longest cached beginning.

        At least one token is left to compute, since the next token is sampled from its logits.
        """
        num_blocks = self._num_cached(token_ids, blocks, self._num_to_look_up(token_ids))
        num_tokens = num_blocks * self.block_size
        tables = [
            self._found(token_ids, blocks, group, first, num_blocks)
            for group, first in enumerate(self._firsts_seen(num_tokens))
        ]
        return Prefix(num_tokens, tuple(tables))

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Length in blocks of the longest beginning of the chain that is cached."""
        blocks = self.empty()
        blocks.hashes = list(hashes)
        return self._num_cached((), blocks, len(hashes))

    def num_written(self, hashes: Sequence[bytes]) -> int:
        """The same of what no step under way has yet to write."""
        for index, block_hash in enumerate(hashes):
            found = [self.pool.find((group, block_hash)) for group in range(len(self._reaches))]
            if any(block is not None and block.num_writers for block in found):
                return self.num_cached(hashes[:index])
        return self.num_cached(hashes)

    def no_prefix(self) -> Prefix:
        return Prefix(0, tuple([] for _ in self._reaches))

    def num_pages_to_admit(self, prefix: Prefix, num_tokens: int, most_at_once: int) -> int:
        """Free pages to have before a sequence of `num_tokens` tokens is begun, computed `most_at_once` at a time.

        Groups that are not full give blocks back while they go on, so they never hold more than their reach and a
        step's tokens, cached blocks included.
        """
        num_new = -(-num_tokens // self.block_size) - prefix.num_tokens // self.block_size
        num_pages = [
            num_new + sum(block is not None and block.num_references == 0 for block in found) for found in prefix.tables
        ]
        for group, reach in self._short:
            num_pages[group] = reach.most_blocks(num_pages[group], most_at_once, self.block_size)
        return sum(num_pages)

    def num_freed(self, holders: Iterable[SequenceBlocks], prefix: Prefix) -> int:
        """Pages that come free when all of these sequences give up their blocks, but for those of the prefix, which
        whoever finds it takes."""
        held = Counter(block for blocks in holders for table in blocks.tables for block in table if block is not None)
        for block in prefix.blocks:
            held.pop(block, None)
        return sum(block.num_references == number for block, number in held.items())

    def adopt(self, blocks: SequenceBlocks, prefix: Prefix, num_queries: int) -> list[TableWrite]:
        """Begin an empty sequence with a cached prefix, after `num_queries` tokens were looked up (0: do not count)."""
        for block in prefix.blocks:
            self.pool.share(block)
        for table, found in zip(blocks.tables, prefix.tables, strict=True):
            table.extend(found)
        blocks.num_offered = prefix.num_tokens // self.block_size
        self.num_queries += num_queries
        self.num_hits += prefix.num_tokens if num_queries else 0
        return [
            (group, index, block.block_id)
            for group, table in enumerate(blocks.tables)
            for index, block in enumerate(table)
            if block is not None
        ]

    def num_pages(self, blocks: SequenceBlocks, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit."""
        return blocks.num_missing(num_tokens) * len(self._reaches)

    def grow(self, blocks: SequenceBlocks, num_tokens: int) -> list[TableWrite] | None:
        """Make `num_tokens` tokens fit; None, and nothing has changed, where not so many pages are free."""
        first, num_missing = len(blocks.tables[0]), blocks.num_missing(num_tokens)
        if num_missing * len(self._reaches) > self.pool.num_free:
            return None
        writes: list[TableWrite] = []
        for index in range(first, first + num_missing):
            for group, table in enumerate(blocks.tables):
                block = self.pool.allocate()
                table.append(block)
                writes.append((group, index, block.block_id))
        return writes

    def offer(self, token_ids: Tokens, blocks: SequenceBlocks, num_tokens: int) -> list[Block]:
        """Make findable every block that the first `num_tokens` tokens fill, and that a step just planned will have
        written; those that became so, to be reported with `wrote` when it has ended."""
        found = self._remember(token_ids, blocks, num_tokens, is_written=False)
        for block in found:
            block.num_writers += 1
        return found

    def wrote(self, found: Sequence[Block]) -> None:
        """The step that they were offered for has ended."""
        for block in found:
            block.num_writers -= 1
        self._report(found)

    def offer_written(self, token_ids: Tokens, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Make findable every block that the first `num_tokens` tokens, which are written, fill."""
        self._report(self._remember(token_ids, blocks, num_tokens, is_written=True))

    def withdraw(self, found: Iterable[Block]) -> None:
        """No step under way will end, and these were to be written by them: they cannot be found any more."""
        for block in found:
            block.num_writers = 0
            self.pool.forget(block)
        if self._event_log is not None:
            self._event_log.lose_steps()

    def arrange(self, token_ids: Tokens, blocks: SequenceBlocks, num_blocks: int) -> list[TableWrite] | None:
        """Give empty tables the blocks that a sequence of these tokens would find were its first `num_blocks` cached:
        those that are, and new ones for the rest, which somebody is to write. The new ones, or None where not so many
        pages are free.
        """
        wanted = [(index, group) for index in range(num_blocks) for group in self.groups_seeing(index, num_blocks)]
        found = {at: self.pool.find((at[1], blocks.hash_of(token_ids, at[0]))) for at in wanted}
        num_missing = sum(block is None for block in found.values())
        num_revived = sum(block is not None and block.num_references == 0 for block in found.values())
        if num_missing + num_revived > self.pool.num_free:
            return None
        for block in found.values():
            if block is not None:
                self.pool.share(block)
        for table in blocks.tables:
            table.extend([None] * num_blocks)
        new: list[TableWrite] = []
        for (index, group), block in found.items():
            if block is None:
                block = self.pool.allocate()
                new.append((group, index, block.block_id))
            blocks.tables[group][index] = block
        return new

    def groups_seeing(self, index: int, num_blocks: int) -> list[int]:
        """KV groups of which block `index` is seen by the token behind the first `num_blocks` blocks."""
        return [group for group, first in enumerate(self._firsts_seen(num_blocks * self.block_size)) if index >= first]

    def hashes_to_look_up(self, token_ids: Tokens, blocks: SequenceBlocks) -> list[bytes]:
        """Of all full blocks that `match` may find."""
        num_blocks = self._num_to_look_up(token_ids)
        if num_blocks:
            blocks.hash_of(token_ids, num_blocks - 1)  # those before it too, at once
        return blocks.hashes[:num_blocks]

    def free_behind(self, blocks: SequenceBlocks, num_tokens: int) -> None:
        """Release blocks that no token from position `num_tokens` on can see."""
        for group, reach in self._short:
            table, first = blocks.tables[group], blocks.num_passed[group]
            last = min(self._first_seen(reach, num_tokens), len(table))
            if first < last:
                self.pool.release([block for block in table[first:last] if block is not None])
                table[first:last] = [None] * (last - first)
                blocks.num_passed[group] = last

    def fork(self, parent: SequenceBlocks, num_tokens: int) -> tuple[SequenceBlocks, list[TableWrite], list[BlockCopy]]:
        """A second holder of the first `num_tokens` tokens: full blocks are shared, a block begun is copied.

        The caller has made sure that `fork_pages` pages are free. The writes are changes to a copy of the parent's
        tables.
        """
        num_full, begun = divmod(num_tokens, self.block_size)
        child = self.empty(parent.extra_keys)
        child.hashes = parent.hashes[:num_full]
        child.num_offered, child.num_passed = min(parent.num_offered, num_full), list(parent.num_passed)
        writes: list[TableWrite] = []
        copies: list[BlockCopy] = []
        for group, (own, theirs) in enumerate(zip(child.tables, parent.tables, strict=True)):
            for block in theirs[:num_full]:
                if block is not None:
                    self.pool.share(block)
                own.append(block)
            if begun:
                source, target = theirs[num_full], self.pool.allocate()
                assert source is not None, "the block that is written next is never behind a window"
                own.append(target)
                writes.append((group, num_full, target.block_id))
                copies.append((source.block_id, target.block_id))
        return child, writes, copies

    def fork_pages(self, num_tokens: int) -> int:
        return len(self._reaches) if num_tokens % self.block_size else 0

    def release(self, blocks: SequenceBlocks) -> None:
        self.pool.release(blocks.take_all())

    def _remember(self, token_ids: Tokens, blocks: SequenceBlocks, num_tokens: int, *, is_written: bool) -> list[Block]:
        num_full = num_tokens // self.block_size
        found: list[Block] = []
        if num_full <= blocks.num_offered:
            return found
        if self._is_caching:
            for index in range(self._first_to_offer(blocks, is_written=is_written), num_full):
                content_hash = blocks.hash_of(token_ids, index)
                for group, table in enumerate(blocks.tables):
                    block = table[index]
                    if block is not None and self.pool.remember(block, (group, content_hash), is_written=is_written):
                        found.append(block)
                        if self._event_log is not None:
                            is_reported = group == self._event_log.group
                            announced = self._announced(token_ids, blocks, index) if is_reported else None
                            self._event_log.announce(block.block_id, announced)
        blocks.num_offered = num_full
        return found

    def _first_to_offer(self, blocks: SequenceBlocks, *, is_written: bool) -> int:
        """The next block; or the first of those just before it that were duplicates, where what they duplicate has been
        lost since: a block is of use only behind those before it."""
        first = blocks.num_offered
        while first and any(
            block is not None
            and self.pool.may_remember(block, (group, blocks.hashes[first - 1]), is_written=is_written)
            for group, block in enumerate(table[first - 1] for table in blocks.tables)
        ):
            first -= 1
        return first

    def _report(self, found: Sequence[Block]) -> None:
        """Blocks that are left out become findable with the next one that their sequence fills."""
        if self._event_log is not None:
            for block_id in self._event_log.wrote(block.block_id for block in found):
                self.pool.forget(self.pool.blocks[block_id])

    def _num_to_look_up(self, token_ids: Tokens) -> int:
        return (len(token_ids) - 1) // self.block_size if self._is_caching else 0

    def _announced(self, token_ids: Tokens, blocks: SequenceBlocks, index: int) -> AnnouncedBlock:
        first = index * self.block_size
        return AnnouncedBlock(
            blocks.hashes[index],
            blocks.hashes[index - 1] if index else None,
            np.asarray(token_ids[first : first + self.block_size]).tolist(),
            () if index else blocks.extra_keys,
        )

    def _num_cached(self, token_ids: Tokens, blocks: SequenceBlocks, most: int) -> int:
        """Length of the longest beginning of which every group has what the next token sees."""
        for group in self._full:
            most = self._num_found(token_ids, blocks, group, most)
        return self._shrink_to_seen(token_ids, blocks, most)

    def _num_found(self, token_ids: Tokens, blocks: SequenceBlocks, group: int, most: int) -> int:
        """Length of the group's chain of findable blocks."""
        for index in range(most):
            if self.pool.find((group, blocks.hash_of(token_ids, index))) is None:
                return index
        return most

    def _shrink_to_seen(self, token_ids: Tokens, blocks: SequenceBlocks, num_blocks: int) -> int:
        """The most blocks, up to `num_blocks`, for which every group has what the next token sees."""
        settled = False
        while num_blocks and not settled:
            settled = True
            for group, reach in self._short:
                first = self._first_seen(reach, num_blocks * self.block_size)
                missing = self._last_missing(token_ids, blocks, group, first, num_blocks)
                if missing is not None:
                    num_blocks, settled = missing, False  # any length above needs the missing block
        return num_blocks

    def _last_missing(self, token_ids: Tokens, blocks: SequenceBlocks, group: int, first: int, last: int) -> int | None:
        for index in reversed(range(first, last)):
            if self.pool.find((group, blocks.hash_of(token_ids, index))) is None:
                return index
        return None

    def _found(
        self, token_ids: Tokens, blocks: SequenceBlocks, group: int, first: int, last: int
    ) -> list[Block | None]:
        seen: list[Block | None] = [
            self.pool.find((group, blocks.hash_of(token_ids, index))) for index in range(first, last)
        ]
        return [None] * first + seen

    def _firsts_seen(self, position: int) -> list[int]:
        """By group."""
        firsts = [0] * len(self._reaches)
        for group, reach in self._short:
            firsts[group] = self._first_seen(reach, position)
        return firsts

    def _first_seen(self, reach: Reach, position: int) -> int:
        """Index of the first block that the token at this position sees."""
        return reach.first_seen(position) // self.block_size


def num_tokens_in(num_blocks: int, block_size: int, num_groups: int) -> int:
    """That so many blocks have room for; a token takes a place in a block of each group."""
    return num_blocks * block_size // num_groups
