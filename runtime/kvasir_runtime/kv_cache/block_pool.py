"""Ownership of KV-cache blocks: reference counts, the free list, and which full blocks can be found again by hash.

Invariant: a block is on the free list exactly when its reference count is 0. A free block keeps its hash until it is
handed out anew, so a prefix stays findable as long as its memory is not needed. What the blocks mean to a request is
the prefix cache's and the scheduler's business.
"""

from collections.abc import Iterable, Sequence


class Block:
    """One block of KV memory. `previous` and `next` link the free list through the block itself (no allocation)."""

    __slots__ = ("block_id", "content_hash", "next", "num_references", "previous")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_references = 0
        self.content_hash: bytes | None = None
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, references={self.num_references})"


class FreeList:
    """Doubly linked list through the blocks; the front is handed out first. Taking from the middle is O(1)."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._ends = Block(-1)
        self._ends.previous = self._ends.next = self._ends
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def pop_front(self) -> Block:
        block = self._ends.next
        assert block is not None
        assert self._length, "popped from an empty free list"
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
        self._length -= 1

    def _insert_before(self, block: Block, place: Block) -> None:
        before = place.previous
        assert before is not None
        assert block.next is None, f"{block} is on the free list already"
        block.previous, block.next = before, place
        before.next = place.previous = block
        self._length += 1


class BlockPool:
    """All blocks of one device, made once.

    Free blocks without a hash are handed out first, then those with one, least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList(self.blocks)
        self._by_hash: dict[bytes, Block] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - len(self._free)

    def allocate(self, num_blocks: int) -> list[Block]:
        """Blocks with one reference each and no content. The caller has made sure that enough are free."""
        assert num_blocks <= len(self._free), f"asked for {num_blocks} blocks, {len(self._free)} are free"
        return [self._hand_out(self._free.pop_front()) for _ in range(num_blocks)]

    def find(self, content_hash: bytes) -> Block | None:
        return self._by_hash.get(content_hash)

    def share(self, blocks: Iterable[Block]) -> None:
        """One more reference to each, reviving those that were free."""
        for block in blocks:
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
                self._free.append(block) if block.content_hash else self._free.prepend(block)

    def remember(self, block: Block, content_hash: bytes) -> None:
        """Make a full block findable. The first block of a content wins; duplicates stay private."""
        if block.content_hash is None and content_hash not in self._by_hash:
            block.content_hash = content_hash
            self._by_hash[content_hash] = block

    def forget_all(self) -> None:
        """Make no block findable any more; blocks in use stay with their requests."""
        for block in self._by_hash.values():
            block.content_hash = None
        self._by_hash.clear()

    def _hand_out(self, block: Block) -> Block:
        if block.content_hash is not None:
            del self._by_hash[block.content_hash]
            block.content_hash = None
        block.num_references = 1
        return block
