"""What readers of KV events are told; blocks hold 4 tokens."""

import pytest
from tests.runtime.kv_cache.groups import groups_of

from kvasir_runtime.kv_cache.blocks import SequenceBlocks, hash_blocks
from kvasir_runtime.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventLog,
    reported_group,
)
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup

TOKENS = list(range(100, 140))


class Cache:
    """A KvCache and the log of its events."""

    def __init__(self, *windows: int | None, num_blocks: int = 64, enabled: bool = True) -> None:
        groups = groups_of(windows or (None,))
        self.log = KvEventLog(4, groups)
        self.kv = KvCache(num_blocks, 4, groups, enable_prefix_caching=enabled, event_log=self.log)
        self.log.take()

    def hold(self, tokens: list[int], *, salt: tuple[bytes, ...] = (), is_written: bool = True) -> SequenceBlocks:
        blocks = self.kv.empty(salt)
        self.kv.grow(blocks, len(tokens))
        found = self.kv.offer(tokens, blocks, len(tokens))
        if is_written:
            self.kv.wrote(found)
        return blocks


def hashes(tokens: list[int], salt: tuple[bytes, ...] = ()) -> list[bytes]:
    return hash_blocks(None, tokens[: len(tokens) // 4 * 4], 4, salt)


def stored(tokens: list[int], first: int, last: int) -> BlockStored:
    """Blocks `first` to before `last` of these tokens."""
    chain = hashes(tokens)
    parent = chain[first - 1] if first else None
    return BlockStored(chain[first:last], parent, tokens[4 * first : 4 * last], 4)


def test_a_log_begins_with_an_empty_cache_so_that_readers_forget_the_engine_before():
    assert KvEventLog(4, (KvGroup((0,)),)).take() == [AllBlocksCleared()]


def test_full_blocks_that_were_written_are_stored_in_one_event_with_their_tokens():
    cache = Cache()
    cache.hold(TOKENS[:11])
    assert cache.log.take() == [stored(TOKENS, 0, 2)]
    assert cache.log.take() == []


def test_a_block_is_not_stored_before_it_is_written():
    cache = Cache()
    blocks = cache.hold(TOKENS[:8], is_written=False)
    assert cache.log.take() == []
    cache.kv.wrote([block for block in blocks.tables[0] if block is not None])
    assert cache.log.take() == [stored(TOKENS, 0, 2)]


def test_a_block_that_is_withdrawn_before_it_was_written_was_never_there():
    cache = Cache()
    blocks = [block for block in cache.hold(TOKENS[:8], is_written=False).tables[0] if block is not None]
    for block in blocks:
        cache.kv.pool.forget(block)
    cache.kv.wrote(blocks)
    assert cache.log.take() == []


def test_later_blocks_name_the_one_before_them_as_parent():
    cache = Cache()
    blocks = cache.hold(TOKENS[:8])
    cache.log.take()
    cache.kv.grow(blocks, 16)
    cache.kv.wrote(cache.kv.offer(TOKENS, blocks, 16))
    assert cache.log.take() == [stored(TOKENS, 2, 4)]


def test_what_another_sequence_holds_already_is_not_stored_again():
    cache = Cache()
    cache.hold(TOKENS[:8])
    cache.hold(TOKENS[:12])
    assert cache.log.take() == [stored(TOKENS, 0, 2), stored(TOKENS, 2, 3)]


def test_sequences_that_are_written_together_are_events_of_their_own():
    cache = Cache()
    others = [*TOKENS[:4], *range(7, 15)]
    first = cache.kv.empty()
    cache.kv.grow(first, 8)
    found = cache.kv.offer(TOKENS, first, 8)
    second = cache.kv.empty()
    cache.kv.adopt(second, cache.kv.match(others, second), 0)
    cache.kv.grow(second, 12)
    cache.kv.wrote([*found, *cache.kv.offer(others, second, 12)])
    assert cache.log.take() == [stored(TOKENS, 0, 2), stored(others, 1, 3)]


def test_the_salt_is_told_with_the_first_block_alone():
    cache = Cache()
    cache.hold(TOKENS[:8], salt=(b"tenant",))
    chain = hashes(TOKENS[:8], (b"tenant",))
    assert cache.log.take() == [BlockStored(chain, None, TOKENS[:8], 4, extra_keys=[("tenant",), None])]


def test_an_evicted_block_is_removed_the_tail_first_and_in_one_event():
    cache = Cache(num_blocks=3)
    cache.kv.release(cache.hold(TOKENS[:12]))
    cache.log.take()
    cache.kv.grow(cache.kv.empty(), 8)
    assert cache.log.take() == [BlockRemoved([hashes(TOKENS)[2], hashes(TOKENS)[1]])]


def test_a_released_block_is_still_there():
    cache = Cache()
    cache.kv.release(cache.hold(TOKENS[:12]))
    cache.log.take()
    cache.kv.grow(cache.kv.empty(), 8)
    assert cache.log.take() == []


def test_events_keep_the_order_in_which_things_happened():
    cache = Cache(num_blocks=2)
    cache.kv.release(cache.hold(TOKENS[:8]))
    cache.kv.release(cache.hold(TOKENS[8:12]))
    cache.hold(TOKENS[16:24])
    first, second = hashes(TOKENS[:8])
    assert cache.log.take() == [
        stored(TOKENS, 0, 2),
        BlockRemoved([second]),
        stored(TOKENS[8:], 0, 1),
        BlockRemoved([first, *hashes(TOKENS[8:12])]),
        stored(TOKENS[16:], 0, 2),
    ]


def test_without_a_prefix_cache_there_is_nothing_to_tell():
    cache = Cache(enabled=False)
    cache.kv.release(cache.hold(TOKENS[:12]))
    cache.hold(TOKENS[:12])
    assert cache.log.take() == []


@pytest.mark.parametrize(
    ("windows", "group"),
    [((None,), 0), ((None, None), 1), ((None, 5), 0), ((5, None), 1), ((5, None, 8), 1), ((5, 8), 1)],
)
def test_the_last_group_that_keeps_all_tokens_speaks_for_all(windows, group):
    assert reported_group(groups_of(windows)) == group


def test_each_block_is_told_once_however_many_groups_there_are():
    cache = Cache(5, None, None, num_blocks=12)
    blocks = cache.hold(TOKENS[:12])
    assert cache.log.take() == [stored(TOKENS, 0, 3)]
    cache.kv.release(blocks)
    cache.kv.grow(cache.kv.empty(), 16)
    assert cache.log.take() == [BlockRemoved(hashes(TOKENS)[2::-1])]


def test_a_prefix_is_reported_as_gone_no_later_than_any_full_group_loses_it():
    cache = Cache(None, None, num_blocks=6)
    cache.kv.release(cache.hold(TOKENS[:12]))
    cache.log.take()
    cache.kv.pool.allocate()
    assert cache.log.take() == [BlockRemoved([hashes(TOKENS)[2]])]
    assert cache.kv.match(TOKENS[:13], cache.kv.empty()).num_tokens == 8


def test_a_block_announced_twice_is_stored_by_the_step_that_writes_it_last():
    cache = Cache()
    blocks = cache.hold(TOKENS[:4], is_written=False)
    [block] = blocks.tables[0]
    assert block is not None
    cache.kv.pool.forget(block)
    blocks.num_offered = 0
    cache.kv.offer(TOKENS, blocks, 4)
    cache.kv.wrote([block])
    assert cache.log.take() == []
    cache.kv.wrote([block])
    assert cache.log.take() == [stored(TOKENS, 0, 1)]


def test_behind_a_window_alone_a_block_is_stored_without_the_one_before_it():
    cache = Cache(5)
    blocks = cache.kv.empty()
    cache.kv.arrange(TOKENS[:13], blocks, 3)
    cache.kv.offer_written(TOKENS[:13], blocks, 12)
    assert cache.log.take() == [stored(TOKENS, 2, 3)]


def test_steps_that_are_lost_delay_nothing_later():
    cache = Cache()
    blocks = cache.hold(TOKENS[:4], is_written=False)
    [block] = blocks.tables[0]
    assert block is not None
    cache.kv.withdraw([block])
    blocks.num_offered = 0
    cache.kv.wrote(cache.kv.offer(TOKENS, blocks, 4))
    assert cache.log.take() == [stored(TOKENS, 0, 1)]


def test_blocks_that_are_stored_later_have_no_salt_of_their_own():
    cache = Cache()
    blocks = cache.hold(TOKENS[:4], salt=(b"tenant",))
    cache.kv.grow(blocks, 8)
    cache.log.take()
    cache.kv.wrote(cache.kv.offer(TOKENS, blocks, 8))
    chain = hashes(TOKENS[:8], (b"tenant",))
    assert cache.log.take() == [BlockStored(chain[1:], chain[0], TOKENS[4:8], 4)]
