"""What a reader that missed batches is sent again; blocks hold 2 tokens."""

import msgspec
import pytest

from kvasir_runtime.engine.replay_buffer import CONDENSED_BLOCKS, ReplayBuffer
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent


def stored(*names: str, parent: str | None = None, extra_keys=None) -> BlockStored:
    hashes = [name.encode() for name in names]
    tokens = [token for name in names for token in (ord(name), ord(name) + 1000)]
    return BlockStored(hashes, None if parent is None else parent.encode(), tokens, 2, extra_keys=extra_keys)


def removed(*names: str) -> BlockRemoved:
    return BlockRemoved([name.encode() for name in names])


def buffer_of(num_batches: int, *batches: list[KvEvent]) -> ReplayBuffer:
    buffer = ReplayBuffer(num_batches)
    for sequence, events in enumerate(batches):
        buffer.append(sequence, msgspec.msgpack.encode(EventBatch(0.0, events)))
    return buffer


def replayed(buffer: ReplayBuffer, start: int = 0) -> list[tuple[int, list[KvEvent]]]:
    return [
        (sequence, msgspec.msgpack.decode(payload, type=EventBatch).events) for sequence, payload in buffer.since(start)
    ]


def test_nothing_was_published_and_nothing_is_sent_again():
    assert replayed(ReplayBuffer(4)) == []


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 1, 2]), (1, [1, 2]), (2, [2]), (3, []), (2**64 - 1, [])])
def test_batches_are_sent_again_from_the_one_asked_for(start, expected):
    buffer = buffer_of(3, [stored("a")], [stored("b")], [stored("c")])
    assert [sequence for sequence, _ in replayed(buffer, start)] == expected


def test_batches_are_the_very_bytes_that_were_published():
    payload = msgspec.msgpack.encode(EventBatch(12.5, [stored("a")]))
    buffer = ReplayBuffer(1)
    buffer.append(7, payload)
    assert list(buffer.since(7)) == [(7, payload)]


def test_of_what_left_the_buffer_the_blocks_that_are_still_there_come_first():
    buffer = buffer_of(1, [stored("a", "b", "c")], [removed("b")], [stored("d", parent="c")])
    assert replayed(buffer) == [
        (1, [AllBlocksCleared(), stored("a", "b", "c"), removed("b")]),
        (2, [stored("d", parent="c")]),
    ]


def test_a_parent_that_comes_back_comes_before_the_child_that_stayed():
    buffer = buffer_of(1, [stored("a", "b", "c")], [removed("b")], [stored("b", parent="a")], [])
    assert replayed(buffer)[0] == (2, [AllBlocksCleared(), stored("a", "b", "c")])


def test_parents_that_are_gone_are_forgotten_with_their_last_child():
    batches = [stored("a", "b")], [stored("c", parent="a")], [removed("a")], [removed("b")], [removed("c")], []
    states = [replayed(buffer_of(1, *batches[:number], []))[0][1][1:] for number in (3, 4, 5)]
    assert states == [
        [stored("a", "b"), stored("c", parent="a"), removed("a")],
        [stored("a"), stored("c", parent="a"), removed("a")],
        [],
    ]


def test_a_reader_that_missed_nothing_of_them_is_spared_them():
    buffer = buffer_of(1, [stored("a")], [stored("b")], [stored("c")])
    assert replayed(buffer, 2) == [(2, [stored("c")])]
    assert replayed(buffer, 1) == [(1, [AllBlocksCleared(), stored("a"), stored("b")]), (2, [stored("c")])]


def test_a_cleared_cache_leaves_nothing_of_before():
    buffer = buffer_of(1, [stored("a")], [AllBlocksCleared(), stored("b")], [])
    assert replayed(buffer) == [(1, [AllBlocksCleared(), stored("b")]), (2, [])]


def test_readers_forget_even_where_nothing_is_left():
    assert replayed(buffer_of(1, [stored("a")], [removed("a")], []))[0] == (1, [AllBlocksCleared()])


def test_a_block_that_comes_back_comes_behind_its_parent():
    buffer = buffer_of(1, [stored("a", "b")], [removed("b", "a")], [stored("a")], [stored("b", parent="a")], [])
    assert replayed(buffer)[0] == (3, [AllBlocksCleared(), stored("a"), stored("b", parent="a")])


def test_extra_keys_stay_with_the_first_block():
    keys = [("salt",), None]
    buffer = buffer_of(1, [stored("a", "b", extra_keys=keys)], [removed("a")], [])
    assert replayed(buffer)[0] == (1, [AllBlocksCleared(), stored("a", "b", extra_keys=keys), removed("a")])
    buffer = buffer_of(1, [stored("a", "b", extra_keys=keys)], [removed("b")], [])
    assert replayed(buffer)[0] == (1, [AllBlocksCleared(), stored("a", extra_keys=[("salt",)])])


@pytest.mark.parametrize(("start", "sequences"), [(0, [3, 4, 5]), (3, [3, 4, 5]), (4, [4, 5]), (5, [5])])
def test_many_blocks_are_spread_over_the_sequences_that_were_asked_for(start: int, sequences: list[int]):
    names = [[chr(256 * number + index) for index in range(CONDENSED_BLOCKS // 2)] for number in range(6)]
    buffer = buffer_of(1, *([stored(*each)] for each in names), [])
    *condensed, _ = replayed(buffer, start)
    assert [sequence for sequence, _ in condensed] == sequences
    first, *blocks = [event for _, events in condensed for event in events]
    assert first == AllBlocksCleared()
    assert blocks == [stored(*each) for each in names]


def test_condensed_batches_bear_their_rank():
    buffer = ReplayBuffer(1, data_parallel_rank=3)
    for sequence, name in enumerate("ab"):
        buffer.append(sequence, msgspec.msgpack.encode(EventBatch(0.0, [stored(name)], 3)))
    ranks = [msgspec.msgpack.decode(payload, type=EventBatch).data_parallel_rank for _, payload in buffer.since(0)]
    assert ranks == [3, 3]
