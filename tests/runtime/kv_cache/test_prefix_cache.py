from kvasir_runtime.kv_cache.block_pool import BlockPool
from kvasir_runtime.kv_cache.block_table import BlockTable
from kvasir_runtime.kv_cache.prefix_cache import PrefixCache

TOKENS = list(range(100, 112))


def cache_with(tokens: list[int], *, enabled: bool = True, salt: tuple[bytes, ...] = ()) -> PrefixCache:
    """A cache with blocks of 4 that holds the full blocks of `tokens`."""
    pool = BlockPool(8)
    cache, table = PrefixCache(pool, enabled=enabled), BlockTable(4, salt)
    table.blocks = pool.allocate(table.num_missing(len(tokens)))
    cache.store(tokens, len(tokens), table)
    return cache


def test_finds_the_longest_chain_of_equal_blocks():
    found = cache_with(TOKENS).match([*TOKENS[:8], 1, 2, 3, 4, 5], BlockTable(4))
    assert [block.block_id for block in found] == [0, 1]


def test_leaves_at_least_one_token_to_compute():
    assert len(cache_with(TOKENS).match(TOKENS, BlockTable(4))) == 2


def test_a_block_behind_a_difference_is_not_found():
    assert cache_with(TOKENS).match([0, *TOKENS[1:], 9], BlockTable(4)) == []


def test_blocks_are_offered_only_when_full_and_computed():
    pool = BlockPool(8)
    cache, table = PrefixCache(pool, enabled=True), BlockTable(4)
    table.blocks = pool.allocate(3)
    cache.store(TOKENS, 7, table)
    assert len(cache.match([*TOKENS, 1], BlockTable(4))) == 1


def test_another_salt_finds_nothing():
    cache = cache_with(TOKENS, salt=(b"a",))
    assert cache.match([*TOKENS, 1], BlockTable(4, (b"b",))) == []
    assert len(cache.match([*TOKENS, 1], BlockTable(4, (b"a",)))) == 3


def test_switched_off_it_neither_keeps_nor_finds():
    assert cache_with(TOKENS, enabled=False).match([*TOKENS, 1], BlockTable(4)) == []


def test_a_table_counts_missing_blocks_and_hands_out_each_id_once():
    pool, table = BlockPool(8), BlockTable(4)
    assert table.num_missing(9) == 3
    table.blocks.extend(pool.allocate(3))
    assert table.take_unsent() == (0, 1, 2)
    assert table.take_unsent() == ()
    assert table.num_missing(12) == 0
