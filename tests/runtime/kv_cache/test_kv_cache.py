"""Prefixes, growth, windows and forks over a pool; blocks hold 4 tokens."""

import pytest
from tests.runtime.kv_cache.groups import Seen, groups_of

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.kv_cache.kv_cache import KvCache, Prefix
from kvasir_runtime.kv_cache.spec import Reach

TOKENS = list(range(100, 140))
FULL: tuple[int | None, ...] = (None,)


def make_cache(*windows: Seen, num_blocks: int = 64, enabled: bool = True) -> KvCache:
    return KvCache(num_blocks, 4, groups_of(windows), enable_prefix_caching=enabled)


def hold(cache: KvCache, num_tokens: int, *, salt: tuple[bytes, ...] = ()) -> SequenceBlocks:
    """A sequence of the first `num_tokens` of TOKENS, written and offered."""
    blocks = cache.empty(salt)
    assert cache.grow(blocks, num_tokens) is not None
    cache.offer(TOKENS, blocks, num_tokens)
    return blocks


def found(prefix: Prefix) -> list[list[int]]:
    """Indices that each group's table holds a block for."""
    return [[index for index, block in enumerate(table) if block is not None] for table in prefix.tables]


def forget(cache: KvCache, blocks: SequenceBlocks, group: int, index: int) -> None:
    block = blocks.tables[group][index]
    assert block is not None
    cache.pool.forget(block)


# --- prefixes -----------------------------------------------------------------------------------------------------


def test_the_longest_chain_of_equal_blocks_is_found():
    cache = make_cache(*FULL)
    held = hold(cache, 12)
    prefix = cache.match([*TOKENS[:8], 1, 2, 3, 4, 5], cache.empty())
    assert prefix.num_tokens == 8
    assert prefix.blocks == held.tables[0][:2]


@pytest.mark.parametrize(("num_tokens", "num_found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_at_least_one_token_is_left_to_compute(num_tokens, num_found):
    cache = make_cache(*FULL)
    hold(cache, 16)
    assert cache.match(TOKENS[:num_tokens], cache.empty()).num_tokens == num_found


def test_what_is_forgotten_is_not_found_and_stays_with_its_holder():
    cache = make_cache(None, 8)
    held = hold(cache, 12)
    cache.forget_all()
    assert cache.match(TOKENS[:12], cache.empty()).num_tokens == 0
    assert cache.pool.num_used == len({block.block_id for table in held.tables for block in table if block})
    hold(cache, 12)
    assert cache.match([*TOKENS[:12], 9], cache.empty()).num_tokens == 12


def test_a_block_behind_a_difference_is_not_found():
    cache = make_cache(*FULL)
    hold(cache, 12)
    assert cache.match([0, *TOKENS[1:12], 9], cache.empty()).num_tokens == 0


def test_a_chain_ends_where_a_block_is_missing_in_any_full_group():
    cache = make_cache(None, None)
    held = hold(cache, 16)
    forget(cache, held, 1, 2)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (8, [[0, 1], [0, 1]])


def test_another_salt_finds_nothing():
    cache = make_cache(*FULL)
    hold(cache, 12, salt=(b"a",))
    assert cache.match(TOKENS[:13], cache.empty((b"b",))).num_tokens == 0
    assert cache.match(TOKENS[:13], cache.empty()).num_tokens == 0
    assert cache.match(TOKENS[:13], cache.empty((b"a",))).num_tokens == 12


def test_switched_off_it_neither_keeps_nor_finds():
    cache = make_cache(*FULL, enabled=False)
    held = hold(cache, 12)
    assert all(block.content is None for block in held.tables[0])
    assert held.num_offered == 3
    assert cache.match(TOKENS[:13], cache.empty()).num_tokens == 0


@pytest.mark.parametrize(
    ("window", "first"), [(1, 4), (2, 3), (5, 3), (6, 2), (9, 2), (10, 1), (13, 1), (14, 0), (50, 0)]
)
def test_of_a_window_group_only_what_the_next_token_sees_is_taken(window, first):
    """The token at position 16 sees positions 17 - window to 16."""
    cache = make_cache(None, window)
    hold(cache, 16)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert prefix.num_tokens == 16
    assert found(prefix) == [[0, 1, 2, 3], list(range(first, 4))]
    assert all(len(table) == 4 for table in prefix.tables), "tables count blocks alike"


def test_blocks_behind_the_window_may_be_gone():
    cache = make_cache(None, 6)
    held = hold(cache, 16)
    forget(cache, held, 1, 0)
    forget(cache, held, 1, 1)
    assert cache.match(TOKENS[:17], cache.empty()).num_tokens == 16


def test_a_prefix_shrinks_to_before_a_missing_tail_block():
    """Without block 3 the next best is 12 tokens, whose next token sees positions 7 to 12: blocks 1 and 2."""
    cache = make_cache(None, 6)
    held = hold(cache, 16)
    forget(cache, held, 1, 3)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (12, [[0, 1, 2], [1, 2]])


def test_a_prefix_shrinks_until_no_needed_block_is_missing():
    cache = make_cache(None, 6)
    held = hold(cache, 16)
    forget(cache, held, 1, 2)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (8, [[0, 1], [0, 1]])


def test_two_windows_shrink_in_turn_until_both_have_what_they_need():
    """Group 1 lacks block 3, which leaves 12 tokens; group 2 sees back to block 1 from there and lacks it, which leaves
    one block."""
    cache = make_cache(None, 3, 6)
    held = hold(cache, 16)
    forget(cache, held, 1, 3)
    forget(cache, held, 2, 1)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (4, [[0], [0], [0]])


def test_a_later_window_that_shrinks_makes_an_earlier_one_look_again():
    cache = make_cache(3, 6)
    held = hold(cache, 16)
    forget(cache, held, 1, 3)
    forget(cache, held, 0, 2)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (8, [[1], [0, 1]])


def test_without_a_full_group_the_tail_alone_is_enough():
    cache = make_cache(6)
    held = hold(cache, 16)
    forget(cache, held, 0, 0)
    forget(cache, held, 0, 1)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (16, [[2, 3]])


def test_nothing_needed_is_nothing_found_when_every_block_is_gone():
    cache = make_cache(None, 6)
    held = hold(cache, 16)
    for index in range(4):
        forget(cache, held, 1, index)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert (prefix.num_tokens, found(prefix)) == (0, [[], []])


def test_no_prefix_has_an_empty_table_for_each_group():
    assert make_cache(None, 6).no_prefix() == Prefix(0, ([], []))


# --- adopting -----------------------------------------------------------------------------------------------------


def test_adopting_shares_the_blocks_and_tells_the_tables():
    cache = make_cache(None, 6)
    held = hold(cache, 16)
    blocks = cache.empty()
    prefix = cache.match(TOKENS[:17], blocks)
    writes = cache.adopt(blocks, prefix, 17)
    ids = [[block and block.block_id for block in table] for table in held.tables]
    assert writes == [*((0, index, ids[0][index]) for index in range(4)), (1, 2, ids[1][2]), (1, 3, ids[1][3])]
    assert [block.num_references for block in prefix.blocks] == [2] * 6
    assert blocks.num_offered == 4, "what was found is not offered again"


def test_adopting_revives_free_blocks():
    cache = make_cache(*FULL, num_blocks=8)
    cache.release(hold(cache, 12))
    blocks = cache.empty()
    cache.adopt(blocks, cache.match(TOKENS[:13], blocks), 13)
    assert cache.pool.num_used == 3


def test_lookups_and_hits_are_counted_in_tokens():
    cache = make_cache(None, 6)
    hold(cache, 16)
    for num_tokens in (13, 3):
        blocks = cache.empty()
        cache.adopt(blocks, cache.match(TOKENS[:num_tokens], blocks), num_tokens)
    assert (cache.num_queries, cache.num_hits) == (16, 12)


def test_a_lookup_that_is_not_to_be_counted_counts_no_hits_either():
    cache = make_cache(*FULL)
    hold(cache, 16)
    blocks = cache.empty()
    cache.adopt(blocks, cache.match(TOKENS[:13], blocks), 0)
    assert (cache.num_queries, cache.num_hits) == (0, 0)


# --- admission ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "pages"), [(1, 1), (4, 1), (5, 2), (40, 10)])
def test_a_full_group_needs_a_page_for_every_block(num_tokens, pages):
    cache = make_cache(*FULL)
    assert cache.num_pages_to_admit(cache.no_prefix(), num_tokens, 8) == pages


@pytest.mark.parametrize(
    ("window", "at_once", "pages"), [(6, 8, 5), (6, 9, 5), (6, 10, 5), (6, 11, 6), (6, 30, 10), (6, 40, 10)]
)
def test_a_window_group_needs_at_most_a_window_and_a_steps_tokens(window, at_once, pages):
    """Over 40 tokens: blocks for window + step, and one more since neither begins at a block's start."""
    cache = make_cache(window)
    assert cache.num_pages_to_admit(cache.no_prefix(), 40, at_once) == pages


def test_the_needs_of_groups_add_up():
    cache = make_cache(None, 6, 2)
    assert cache.num_pages_to_admit(cache.no_prefix(), 40, 8) == 10 + 5 + 4


def test_a_cached_prefix_costs_a_page_only_where_its_blocks_are_free():
    cache = make_cache(*FULL)
    held = hold(cache, 16)
    prefix = cache.match(TOKENS[:17], cache.empty())
    assert cache.num_pages_to_admit(prefix, 24, 8) == 2
    cache.release(held)
    assert cache.num_pages_to_admit(prefix, 24, 8) == 2 + 4, "reviving takes a block off the free list"


@pytest.mark.parametrize(
    "windows", [(None,), (6,), (None, 6, 3), (1,), (5, 4), (None, Reach.chunk(8)), (Reach.chunk(6), 3)]
)
@pytest.mark.parametrize("at_once", [1, 3, 4, 7, 16])
def test_the_bound_is_enough_for_a_sequence_that_lets_go_of_what_is_behind_its_windows(windows, at_once):
    cache = make_cache(*windows)
    bound = cache.num_pages_to_admit(cache.no_prefix(), 40, at_once)
    blocks, most_used = cache.empty(), 0
    for start in range(0, 40, at_once):
        end = min(start + at_once, 40)
        cache.grow(blocks, end)
        most_used = max(most_used, cache.pool.num_used)
        cache.free_behind(blocks, end)
    assert most_used <= bound


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6, 3), (1,), (16, 40), (None, Reach.chunk(12))])
@pytest.mark.parametrize("at_once", [1, 4, 7])
@pytest.mark.parametrize("num_cached", [4, 20, 36])
@pytest.mark.parametrize("is_held", [False, True])
def test_the_bound_is_enough_behind_a_cached_prefix_and_no_more_than_without_one(windows, at_once, num_cached, is_held):
    cache = make_cache(*windows)
    held = hold(cache, num_cached)
    if not is_held:
        cache.release(held)
    blocks, before = cache.empty(), cache.pool.num_used
    prefix = cache.match(TOKENS[: num_cached + 1], blocks)
    bound = cache.num_pages_to_admit(prefix, 40, at_once)
    cache.adopt(blocks, prefix, 0)
    most_used = cache.pool.num_used
    for start in range(num_cached, 40, at_once):
        end = min(start + at_once, 40)
        cache.grow(blocks, end)
        most_used = max(most_used, cache.pool.num_used)
        cache.free_behind(blocks, end)
    assert most_used - before <= bound
    assert bound <= cache.num_pages_to_admit(cache.no_prefix(), 40, at_once)


# --- growing and offering -----------------------------------------------------------------------------------------


def test_growing_adds_what_is_missing_to_every_group():
    cache = make_cache(None, 6)
    blocks = cache.empty()
    assert cache.num_pages(blocks, 5) == 4
    assert cache.grow(blocks, 5) == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert cache.num_pages(blocks, 8) == 0
    assert cache.grow(blocks, 8) == []
    assert cache.num_pages(blocks, 9) == 2
    assert cache.grow(blocks, 9) == [(0, 2, 4), (1, 2, 5)]
    assert cache.grow(blocks, 5) == []


def test_growing_takes_the_last_free_pages_or_none_of_too_few():
    cache = make_cache(None, 6, num_blocks=5)
    first, second = cache.empty(), cache.empty()
    assert cache.grow(first, 9) is None
    assert (first.capacity, cache.pool.num_free) == (0, 5)
    assert cache.grow(first, 8) == [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]
    assert cache.grow(second, 1) is None, "a page is free, but each group needs one"
    assert (second.capacity, cache.pool.num_free) == (0, 1)
    assert cache.grow(first, 8) == []


@pytest.mark.parametrize(("num_tokens", "num_found"), [(3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3)])
def test_a_block_that_is_not_full_is_never_offered(num_tokens, num_found):
    cache = make_cache(*FULL)
    blocks = cache.empty()
    cache.grow(blocks, 12)
    assert len(cache.offer(TOKENS, blocks, num_tokens)) == num_found
    assert blocks.num_offered == num_found
    assert cache.match(TOKENS, cache.empty()).num_tokens == 4 * num_found


def test_a_partial_block_is_not_hashed_so_its_later_tokens_count():
    cache = make_cache(*FULL)
    blocks = cache.empty()
    cache.grow(blocks, 8)
    cache.offer([*TOKENS[:6], 0, 0], blocks, 6)
    cache.offer(TOKENS[:8], blocks, 8)
    assert cache.match(TOKENS[:9], cache.empty()).num_tokens == 8


def test_blocks_are_offered_once_and_those_that_became_findable_are_told():
    cache = make_cache(None, 6)
    blocks = cache.empty()
    cache.grow(blocks, 12)
    assert cache.offer(TOKENS, blocks, 9) == [blocks.tables[0][0], blocks.tables[1][0], *_column(blocks, 1)]
    assert cache.offer(TOKENS, blocks, 9) == []
    assert cache.offer(TOKENS, blocks, 12) == _column(blocks, 2)
    assert (cache.offer(TOKENS, blocks, 8), blocks.num_offered) == ([], 3)


def test_what_is_written_is_told_from_what_steps_under_way_are_to_write():
    cache = make_cache(None, 6)
    first, second = hold(cache, 4), cache.empty()
    hashes = cache.hashes_to_look_up(TOKENS[:13], cache.empty())
    assert (cache.num_cached(hashes), cache.num_written(hashes)) == (1, 0)
    assert cache.num_written([b"unknown", *hashes]) == 0
    cache.wrote([block for table in first.tables for block in table if block is not None])
    cache.grow(second, 8)
    found = cache.offer(TOKENS, second, 8)
    assert (cache.num_cached(hashes), cache.num_written(hashes)) == (2, 1)
    cache.wrote(found)
    assert (cache.num_cached(hashes), cache.num_written(hashes)) == (2, 2)
    assert cache.num_written([]) == 0


def test_written_blocks_are_found_instead_of_those_yet_to_be_written():
    cache = make_cache(*FULL)
    planned, written = hold(cache, 8), cache.empty()
    cache.grow(written, 8)
    cache.offer_written(TOKENS, written, 8)
    assert cache.match(TOKENS[:9], cache.empty()).blocks == written.tables[0]
    assert (written.num_offered, cache.num_written(written.hashes)) == (2, 2)
    cache.wrote([block for block in planned.tables[0] if block is not None])
    assert cache.match(TOKENS[:9], cache.empty()).blocks == written.tables[0]


def test_what_lost_steps_were_to_write_may_be_written_by_others():
    cache = make_cache(*FULL)
    blocks = cache.empty()
    cache.grow(blocks, 8)
    cache.withdraw(cache.offer(TOKENS, blocks, 8))
    assert cache.num_cached(blocks.hashes) == 0
    blocks.num_offered = 0
    cache.offer_written(TOKENS, blocks, 8)
    assert cache.num_written(blocks.hashes) == 2


def _column(blocks: SequenceBlocks, index: int) -> list[object]:
    return [table[index] for table in blocks.tables]


def test_of_two_sequences_with_equal_tokens_the_first_ones_blocks_are_found():
    cache = make_cache(*FULL)
    first, second = hold(cache, 8), cache.empty()
    cache.grow(second, 8)
    assert cache.offer(TOKENS, second, 8) == []
    assert cache.match(TOKENS[:9], cache.empty()).blocks == first.tables[0]


def test_a_withdrawn_block_is_not_found_but_stays_with_its_sequence():
    cache = make_cache(*FULL)
    blocks = cache.empty()
    cache.grow(blocks, 8)
    for block in cache.offer(TOKENS, blocks, 8):
        cache.pool.forget(block)
    assert cache.match(TOKENS[:9], cache.empty()).num_tokens == 0
    assert cache.pool.num_used == 2


def test_going_back_offers_nothing_and_forgets_nothing():
    cache = make_cache(*FULL)
    blocks = hold(cache, 12)
    assert cache.offer(TOKENS, blocks, 4) == []
    assert blocks.num_offered == 3


# --- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "num_tokens", "num_freed"),
    [(6, 8, 0), (6, 9, 1), (6, 12, 1), (6, 13, 2), (1, 3, 0), (1, 4, 1), (4, 6, 0), (4, 7, 1), (20, 16, 0)],
)
def test_a_block_is_freed_exactly_when_the_next_token_no_longer_sees_its_last_one(window, num_tokens, num_freed):
    """The token at position p sees p - window + 1 to p; block 0 ends at position 3."""
    cache = make_cache(None, window)
    blocks = hold(cache, 16)
    cache.free_behind(blocks, num_tokens)
    full, windowed = blocks.tables
    assert [block is None for block in windowed] == [True] * num_freed + [False] * (4 - num_freed)
    assert None not in full
    assert blocks.num_passed == [0, num_freed]
    assert cache.pool.num_used == 8 - num_freed


def test_freeing_goes_on_where_it_stopped_and_frees_nothing_twice():
    cache = make_cache(6)
    blocks = hold(cache, 32)
    for num_tokens in (13, 13, 9, 21):
        cache.free_behind(blocks, num_tokens)
    assert blocks.num_passed == [4]
    assert cache.pool.num_used == 4


def test_freeing_beyond_the_table_stops_at_its_end():
    cache = make_cache(2)
    blocks = hold(cache, 8)
    cache.free_behind(blocks, 40)
    assert (blocks.tables, blocks.num_passed, cache.pool.num_used) == (([None, None],), [2], 0)


def test_an_adopted_table_with_gaps_is_freed_on_from_there():
    cache = make_cache(None, 6)
    held, blocks = hold(cache, 16), cache.empty()
    cache.adopt(blocks, cache.match(TOKENS[:17], blocks), 0)
    cache.grow(blocks, 24)
    cache.free_behind(blocks, 21)
    assert [block is None for block in blocks.tables[1]] == [True] * 4 + [False] * 2
    assert [block.num_references for block in held.tables[1]] == [1] * 4


def test_what_was_freed_behind_a_window_stays_findable():
    cache = make_cache(None, 6)
    blocks = hold(cache, 16)
    cache.free_behind(blocks, 16)
    assert cache.match(TOKENS[:9], cache.empty()).num_tokens == 8


# --- forks --------------------------------------------------------------------------------------------------------


def test_a_fork_at_a_blocks_end_shares_all_and_copies_nothing():
    cache = make_cache(None, 6)
    parent = hold(cache, 12)
    assert cache.fork_pages(8) == 0
    child, writes, copies = cache.fork(parent, 8)
    assert (writes, copies) == ([], [])
    assert child.tables == tuple(table[:2] for table in parent.tables)
    assert [block.num_references for block in child.tables[0]] == [2, 2]
    assert parent.tables[0][2].num_references == 1
    assert cache.pool.num_used == 6


def test_a_fork_in_the_middle_of_a_block_copies_that_block_in_every_group():
    cache = make_cache(None, 6)
    parent = hold(cache, 12)
    assert cache.fork_pages(6) == cache.fork_pages(5) == cache.fork_pages(7) == 2
    child, writes, copies = cache.fork(parent, 6)
    own = [table[1] for table in child.tables]
    assert writes == [(group, 1, block.block_id) for group, block in enumerate(own)]
    assert copies == [(parent.tables[group][1].block_id, block.block_id) for group, block in enumerate(own)]
    assert [table[0] for table in child.tables] == [table[0] for table in parent.tables]
    assert [len(table) for table in child.tables] == [2, 2]
    assert [parent.tables[0][1].num_references, own[0].num_references] == [1, 1]


def test_a_fork_of_nothing_is_empty():
    cache = make_cache(None)
    child, writes, copies = cache.fork(hold(cache, 8), 0)
    assert (child.tables, writes, copies) == (([],), [], [])


def test_a_fork_knows_no_hash_of_what_it_may_write_otherwise():
    cache = make_cache(None)
    parent = hold(cache, 12, salt=(b"a",))
    child, _, _ = cache.fork(parent, 6)
    assert (child.hashes, child.num_offered, child.extra_keys) == (parent.hashes[:1], 1, (b"a",))
    cache.offer([*TOKENS[:6], 0, 0], child, 8)
    assert cache.match(TOKENS[:9], cache.empty((b"a",))).blocks == parent.tables[0][:2]
    assert cache.match([*TOKENS[:6], 0, 0, 1], cache.empty((b"a",))).blocks == child.tables[0]


def test_a_fork_offers_what_the_parent_had_not_offered():
    cache = make_cache(None)
    parent = hold(cache, 4)
    cache.grow(parent, 12)
    child, _, _ = cache.fork(parent, 12)
    assert child.num_offered == 1
    assert len(cache.offer(TOKENS, child, 12)) == 2


def test_a_fork_keeps_the_gaps_behind_a_window_and_passes_on_from_there():
    cache = make_cache(None, 6)
    parent = hold(cache, 16)
    cache.free_behind(parent, 13)
    child, _, _ = cache.fork(parent, 14)
    assert [block is None for block in child.tables[1]] == [True, True, False, False]
    cache.free_behind(child, 17)
    assert child.num_passed == [0, 3]
    assert parent.num_passed == [0, 2], "the child counts for itself"


def test_parent_and_fork_give_back_everything_in_either_order():
    for order in (0, 1):
        cache = make_cache(None, 6)
        parent = hold(cache, 14)
        cache.free_behind(parent, 13)
        child, _, _ = cache.fork(parent, 14)
        for blocks in (parent, child)[:: 1 if order else -1]:
            cache.release(blocks)
        assert cache.pool.num_used == 0


def test_released_blocks_stay_findable_and_the_sequence_may_begin_again():
    cache = make_cache(None)
    blocks = hold(cache, 12)
    cache.release(blocks)
    assert (blocks.capacity, blocks.num_offered) == (0, 0)
    cache.adopt(blocks, cache.match(TOKENS[:13], blocks), 0)
    assert (blocks.capacity, blocks.num_offered) == (12, 3)


# --- chunks -------------------------------------------------------------------------------------------------------


def test_a_prefix_that_ends_with_a_chunk_needs_no_block_of_its_group():
    cache = make_cache(None, Reach.chunk(8))
    held = hold(cache, 40)
    for index in range(10):
        forget(cache, held, 1, index)
    assert found(cache.match(TOKENS[:18], cache.empty())) == [[0, 1, 2, 3], []]
    assert cache.match(TOKENS[:24], cache.empty()).num_tokens == 16, "five blocks end within a chunk"


def test_a_prefix_that_ends_within_a_chunk_needs_the_chunk_so_far():
    cache = make_cache(None, Reach.chunk(16))
    hold(cache, 40)
    assert found(cache.match(TOKENS[:25], cache.empty())) == [[0, 1, 2, 3, 4, 5], [4, 5]]


def test_a_chunk_is_freed_whole_when_its_last_token_is_written():
    cache = make_cache(Reach.chunk(8))
    held = hold(cache, 12)
    for written, freed in ((7, 0), (8, 2), (11, 2)):
        cache.free_behind(held, written)
        assert [block is None for block in held.tables[0]].count(True) == freed


def test_a_chunk_that_ends_within_a_block_keeps_the_block():
    cache = make_cache(Reach.chunk(6))
    held = hold(cache, 12)
    cache.free_behind(held, 6)
    assert [block is None for block in held.tables[0]] == [True, False, False]


def test_groups_that_see_a_block_are_those_whose_next_token_does():
    cache = make_cache(None, Reach.chunk(16), 6)
    assert [cache.groups_seeing(index, 6) for index in (0, 3, 4, 5)] == [[0], [0], [0, 1, 2], [0, 1, 2]]
    assert cache.groups_seeing(3, 4) == [0, 2]
