"""Published batches of KV events, to be sent again: the last ones as they were, earlier ones condensed.

A router that starts late, or was away for long, must learn what an engine has held since before the oldest batch kept:
most of all the system prompts that all share. So what leaves the buffer is folded into the set of blocks that are
still there, and a replay from further back begins with AllBlocksCleared and those: ordinary events, which any reader
understands. Appended to by one thread and read by another.

A reader knows a block by those before it. So a block comes behind its parent, and where that is gone while it is still
there itself, the parent is sent too, and at the end that it was removed: then the block counts again once the parent
comes back, as for those who heard everything.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

CONDENSED_BLOCKS = 512
"""Of one condensed batch: a millisecond's work at most, between which the engine's thread gets its turn."""


class _StoredUnread(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    """A BlockStored whose tokens stay the bytes that they are, until somebody asks."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None

    def part(self, first: int, last: int) -> BlockStored:
        """Its blocks from `first` to before `last`."""
        token_ids = msgspec.msgpack.decode(self.token_ids, type=list[int])
        return BlockStored(
            self.block_hashes[first:last],
            self.block_hashes[first - 1] if first else self.parent_block_hash,
            token_ids[first * self.block_size : last * self.block_size],
            self.block_size,
            self.lora_id,
            self.medium,
            self.lora_name,
            None if first or self.extra_keys is None else self.extra_keys[:last],
        )


class _UnreadBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredUnread | BlockRemoved | AllBlocksCleared]


@dataclass(slots=True)
class _Block:
    event: _StoredUnread
    place: int
    """Of the block in it."""
    parent: bytes | None
    """None where no block before it is known."""
    num_children: int = 0


class _CondensedBlocks:
    """Those that are there, and those before them, in an order in which each comes behind its parent: one that returns
    keeps its place before its children."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._gone: set[bytes] = set()

    def snapshot(self) -> tuple[list[_Block], list[bytes]]:
        """All, and which of them are gone."""
        return list(self._blocks.values()), list(self._gone)

    def fold(self, event: _StoredUnread | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case _StoredUnread():
                for place, block_hash in enumerate(event.block_hashes):
                    parent = event.block_hashes[place - 1] if place else event.parent_block_hash
                    self._store(block_hash, _Block(event, place, parent if parent in self._blocks else None))
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    self._remove(block_hash)
            case AllBlocksCleared():
                self._blocks.clear()
                self._gone.clear()

    def _store(self, block_hash: bytes, block: _Block) -> None:
        self._gone.discard(block_hash)
        if block_hash in self._blocks:
            return
        self._blocks[block_hash] = block
        if block.parent is not None:
            self._blocks[block.parent].num_children += 1

    def _remove(self, block_hash: bytes) -> None:
        """With those before it that nobody needs any more."""
        if block_hash not in self._blocks:
            return
        self._gone.add(block_hash)
        at: bytes | None = block_hash
        while at in self._gone and not self._blocks[at].num_children:
            self._gone.remove(at)
            at = self._blocks.pop(at).parent
            if at is not None:
                self._blocks[at].num_children -= 1


class ReplayBuffer:
    def __init__(self, num_batches: int, data_parallel_rank: int | None = None) -> None:
        self._data_parallel_rank = data_parallel_rank
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_batches = num_batches
        self._condensed = _CondensedBlocks()
        """Those before the first of the batches."""
        self._decoder = msgspec.msgpack.Decoder(_UnreadBatch)
        self._lock = threading.Lock()

    def append(self, sequence: int, payload: bytes) -> None:
        """The next batch, as it is sent; sequences have no gaps."""
        with self._lock:
            if len(self._batches) == self._num_batches:
                for event in self._decoder.decode(self._batches.popleft()[1]).events:
                    self._condensed.fold(event)
            self._batches.append((sequence, payload))

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, payload) of all batches from `start` on. What is condensed bears the sequences before the oldest
        batch, and is left out where the reader has seen them."""
        with self._lock:
            oldest = self._batches[0][0] if self._batches else start
            num_skipped = min(max(0, start - oldest), len(self._batches))
            batches = list(itertools.islice(self._batches, num_skipped, None))
            condensed = self._condensed.snapshot() if start < oldest else None
        if condensed is not None:
            for sequence, events in _condensed_batches(*condensed, start, oldest):
                yield sequence, msgspec.msgpack.encode(EventBatch(time.time(), events, self._data_parallel_rank))
        yield from batches


def _condensed_batches(
    blocks: list[_Block], gone: list[bytes], start: int, end: int
) -> Iterator[tuple[int, list[KvEvent]]]:
    """As few batches as there are sequences for, the last of them just before `end`."""
    size = max(CONDENSED_BLOCKS, -(-len(blocks) // (end - start)))
    chunks = [blocks[first : first + size] for first in range(0, len(blocks), size)] or [[]]
    for sequence, chunk in zip(itertools.count(end - len(chunks)), chunks, strict=False):
        events: list[KvEvent] = [AllBlocksCleared()] if sequence == end - len(chunks) else []
        events += _joined(chunk)
        if gone and sequence == end - 1:
            events.append(BlockRemoved(gone))
        yield sequence, events


def _joined(blocks: list[_Block]) -> Iterator[BlockStored]:
    """Neighbours that one event brought are one event again."""
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or not _follows(blocks[index + 1], block):
            yield block.event.part(blocks[first].place, block.place + 1)
            first = index + 1


def _follows(block: _Block, before: _Block) -> bool:
    return block.event is before.event and block.place == before.place + 1
