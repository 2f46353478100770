"""Who holds which KV-cache blocks: the pool of all, and the tables of each sequence.

The pool keeps reference counts, the free list, and which full blocks can be found again by hash. Invariants: a block is
on the free list exactly when its reference count is 0, and a free block keeps its hash until it is handed out anew, so
a prefix stays findable as long as its memory is not needed. A hash is announced when the step that writes the block is
planned, since steps run in order and later ones read what it wrote; it is withdrawn when that step fails. A block may
be given out again at once: whoever gets it touches it after the last step, copy or transfer that was to touch it
before. A step comes after those planned earlier; a copy that waits for a step is dropped with the sequence that it is
for; a transfer holds a reference, and begins after the steps that are under way.

A sequence has a table for each KV group, and the hashes of its full blocks as far as known. All tables count blocks
alike: entry i of every table holds tokens [i * block_size, (i + 1) * block_size). An entry is None where its block lies
behind what the group's tokens see.

A full block's identity is a hash chained over everything before it. The rule is shared with routers and KV-event
readers (DESIGN.md section 3), so it is bytes in, bytes out, and nothing of Python's own hashing. Equal digests mean
equal tokens at equal positions under equal extra keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.events import KvEventLog

ContentKey = tuple[int, bytes]
"""What a block holds: its KV group, and the hash of its tokens."""


class Block:
    """One block of KV memory. `num_writers`: steps under way that are to write what it was made findable for.
    `previous` and `next` link the free list through the block itself (no allocation)."""

    __slots__ = ("block_id", "content", "next", "num_references", "num_writers", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_references = 0
        self.num_writers = 0
        self.content: ContentKey | None = None
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, references={self.num_references})"


class FreeList:
    """Doubly linked list through the blocks; the front is handed out first. Taking from the middle is O(1)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(-1)
        self._ends.previous = self._ends.next = self._ends
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def pop_front(self) -> Block:
        block = self._ends.next
        assert block is not None
        assert self.num_blocks, "popped from an empty free list"
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        self._insert_before(block, self._ends)

    def prepend(self, block: Block) -> None:
        first = self._ends.next
        assert first is not None
        self._insert_before(block, first)

    def remove(self, block: Block) -> None:
        before, after = block.previous, block.next
        assert before is not None, f"{block} is not on the free list"
        assert after is not None
        before.next, after.previous = after, before
        block.previous = block.next = None
        self.num_blocks -= 1

    def _insert_before(self, block: Block, place: Block) -> None:
        before = place.previous
        assert before is not None
        assert block.next is None, f"{block} is on the free list already"
        block.previous, block.next = before, place
        before.next = place.previous = block
        self.num_blocks += 1


class BlockPool:
    """All blocks of one device, made once.

    Free blocks without a hash are handed out first, then those with one, least recently released first.
    """

    def __init__(self, num_blocks: int, event_log: KvEventLog | None = None) -> None:
        self.num_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks)
        self._by_content: dict[ContentKey, Block] = {}
        self._event_log = event_log

    @property
    def num_free(self) -> int:
        return self._free.num_blocks

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._free.num_blocks

    def allocate(self) -> Block:
        """A block with one reference and no content. The caller has made sure that one is free."""
        block = self._free.pop_front()
        self.forget(block)
        block.num_references = 1
        return block

    def find(self, content: ContentKey) -> Block | None:
        return self._by_content.get(content)

    def share(self, block: Block) -> None:
        """One more reference, reviving the block where it was free."""
        if block.num_references == 0:
            self._free.remove(block)
        block.num_references += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """One reference less to each. Of those that become free, later ones are handed out before earlier ones, so that
        the tail of a prompt is lost before its head."""
        for block in reversed(blocks):
            block.num_references -= 1
            assert block.num_references >= 0, f"{block} was released more often than it was held"
            if block.num_references == 0:
                self._free.append(block) if block.content else self._free.prepend(block)

    def remember(self, block: Block, content: ContentKey, *, is_written: bool = False) -> bool:
        """Make a full block findable, and say whether it became so now: the first block of a content wins, duplicates
        stay private."""
        if not self.may_remember(block, content, is_written=is_written):
            return False
        if content in self._by_content:
            self.forget(self._by_content[content])
        block.content = content
        self._by_content[content] = block
        return True

    def may_remember(self, block: Block, content: ContentKey, *, is_written: bool = False) -> bool:
        """Whether `remember` would. A written block takes the place of one that a step under way is to write, of which
        readers of events would hear only after blocks behind this one."""
        if block.content is not None:
            return False
        found = self._by_content.get(content)
        return found is None or (is_written and found.num_writers > 0)

    def forget(self, block: Block) -> None:
        """Make a block findable no more; whoever holds it keeps it."""
        if block.content is not None:
            del self._by_content[block.content]
            if self._event_log is not None:
                self._event_log.forget(block.block_id, *block.content)
            block.content = None


Tokens = Sequence[int] | NDArray[np.int32]
DIGEST_BYTES = 16
_INT32 = np.dtype("<i4")  # token ids are not negative, so signed and unsigned are the same bytes


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


def hash_blocks(
    parent: bytes | None, token_ids: Tokens, block_size: int, extra_keys: tuple[bytes, ...] = ()
) -> list[bytes]:
    """Digests of full blocks in a row, of which the first comes after `parent` and has the extra keys.

    SHA-256 over the digest before it (nothing for a prompt's first block), the token ids as little-endian uint32, and
    each extra key preceded by its length as little-endian uint32, cut to `DIGEST_BYTES`.
    """
    tokens = np.asarray(token_ids, dtype=_INT32).tobytes()  # one array: one for each block costs more than its hash
    keys = b"".join([len(key).to_bytes(4, "little") + key for key in extra_keys]) if extra_keys else b""
    block_bytes = block_size * _INT32.itemsize
    if len(tokens) == block_bytes:  # all that a running sequence asks for
        return [sha256((parent or b"") + tokens + keys).digest()[:DIGEST_BYTES]]
    digest, digests = parent or b"", []
    for first in range(0, len(tokens), block_bytes):
        digest = sha256(digest + tokens[first : first + block_bytes] + keys).digest()[:DIGEST_BYTES]
        digests.append(digest)
        keys = b""
    return digests
