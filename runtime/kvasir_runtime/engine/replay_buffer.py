"""Published batches of KV events, to be sent again: the last ones as they were, earlier ones condensed.

A router that starts late, or was away for long, must learn what an engine has held since before the oldest batch kept:
most of all the system prompts that all share. So what leaves the buffer is folded into the set of blocks that are
still there, and a replay from further back begins with AllBlocksCleared and those: ordinary events, which any reader
understands. Appended to by one thread and read by another.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator

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


class ReplayBuffer:
    def __init__(self, num_batches: int, data_parallel_rank: int | None = None) -> None:
        self._data_parallel_rank = data_parallel_rank
        self._batches: deque[tuple[int, bytes]] = deque()
        self._num_batches = num_batches
        self._condensed: dict[bytes, tuple[_StoredUnread, int]] = {}
        """Hash of each block that was there before the first of the batches -> the event, and its place in that."""
        self._decoder = msgspec.msgpack.Decoder(_UnreadBatch)
        self._lock = threading.Lock()

    def append(self, sequence: int, payload: bytes) -> None:
        """The next batch, as it is sent; sequences have no gaps."""
        with self._lock:
            if len(self._batches) == self._num_batches:
                self._condense(self._batches.popleft()[1])
            self._batches.append((sequence, payload))

    def since(self, start: int) -> Iterator[tuple[int, bytes]]:
        """(sequence, payload) of all batches from `start` on. What is condensed bears the sequences before the oldest
        batch, and is left out where the reader has seen them."""
        with self._lock:
            oldest = self._batches[0][0] if self._batches else start
            num_skipped = min(max(0, start - oldest), len(self._batches))
            batches = list(itertools.islice(self._batches, num_skipped, None))
            condensed = list(self._condensed.values()) if start < oldest else None
        if condensed is not None:
            for sequence, events in _condensed_batches(condensed, start, oldest):
                yield sequence, msgspec.msgpack.encode(EventBatch(time.time(), events, self._data_parallel_rank))
        yield from batches

    def _condense(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            match event:
                case _StoredUnread():
                    for index, block_hash in enumerate(event.block_hashes):
                        self._condensed[block_hash] = event, index
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        self._condensed.pop(block_hash, None)
                case AllBlocksCleared():
                    self._condensed.clear()


def _condensed_batches(
    blocks: list[tuple[_StoredUnread, int]], start: int, end: int
) -> Iterator[tuple[int, list[KvEvent]]]:
    """As few batches as there are sequences for, the last of them just before `end`."""
    size = max(CONDENSED_BLOCKS, -(-len(blocks) // (end - start)))
    chunks = [blocks[first : first + size] for first in range(0, len(blocks), size)] or [[]]
    for sequence, chunk in zip(itertools.count(end - len(chunks)), chunks, strict=False):
        events: list[KvEvent] = [AllBlocksCleared()] if sequence == end - len(chunks) else []
        events += _joined(chunk)
        yield sequence, events


def _joined(blocks: list[tuple[_StoredUnread, int]]) -> Iterator[BlockStored]:
    """Neighbours that one event brought are one event again."""
    first = 0
    for place, (event, index) in enumerate(blocks):
        has_next = place + 1 < len(blocks) and _follows(blocks[place + 1], event, index)
        if not has_next:
            yield event.part(blocks[first][1], index + 1)
            first = place + 1


def _follows(block: tuple[_StoredUnread, int], event: _StoredUnread, index: int) -> bool:
    return block[0] is event and block[1] == index + 1
