"""Reference counts, the order in which free blocks are handed out, and which full blocks can be found."""

import random
from collections import Counter

import pytest

from kvasir_runtime.kv_cache.blocks import Block, BlockPool


def full_pool(num_blocks: int) -> tuple[BlockPool, list[Block]]:
    """A pool all of whose blocks are held, each with a content of its own: (0, b"0"), (0, b"1") ..."""
    pool = BlockPool(num_blocks)
    blocks = [pool.allocate() for _ in range(num_blocks)]
    for index, block in enumerate(blocks):
        assert pool.remember(block, content(index))
    return pool, blocks


def content(index: int) -> tuple[int, bytes]:
    return 0, b"%d" % index


def test_allocated_blocks_are_distinct_and_no_longer_free():
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    assert [block.block_id for block in blocks] == [0, 1, 2]
    assert all(block.num_references == 1 and block.content is None for block in blocks)
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (4, 1, 3)


def test_allocating_from_an_empty_pool_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="empty free list"):
        BlockPool(0).allocate()


def test_a_shared_block_is_free_only_after_its_last_reference():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_releasing_too_often_is_noticed():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_a_written_block_takes_the_place_of_one_that_is_yet_to_be_written_and_of_no_other():
    pool, [planned, written] = full_pool(2)
    own = content(0)
    pool.forget(written)
    assert not pool.remember(written, own, is_written=True), "the other is written as well"
    planned.num_writers = 1
    assert not pool.remember(written, own)
    assert not pool.remember(planned, own, is_written=True), "it is the one that is found"
    assert pool.remember(written, own, is_written=True)
    assert (pool.find(own), planned.content) == (written, None)
    assert not pool.remember(planned, own, is_written=True)


def test_a_free_block_stays_findable_until_its_memory_is_needed():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.remember(block, content(0))
    pool.release([block])
    assert pool.find(content(0)) is block
    pool.allocate()
    assert pool.find(content(0)) is block, "the block without content goes first"
    assert pool.allocate() is block
    assert pool.find(content(0)) is None
    assert block.content is None


def test_a_block_without_content_is_handed_out_before_all_with_one_however_late_it_is_released():
    pool, blocks = full_pool(3)
    pool.forget(blocks[2])
    pool.release(blocks[:2])
    pool.release([blocks[2]])
    assert pool.allocate() is blocks[2]


def test_the_least_recently_released_content_is_lost_first():
    pool, blocks = full_pool(3)
    for index in (1, 2, 0):
        pool.release([blocks[index]])
    assert [pool.allocate().block_id for _ in range(3)] == [1, 2, 0]


def test_use_makes_a_content_recent_again():
    pool, blocks = full_pool(3)
    for block in blocks:
        pool.release([block])
    pool.share(blocks[0])
    pool.release([blocks[0]])
    assert [pool.allocate().block_id for _ in range(3)] == [1, 2, 0]


def test_a_found_free_block_is_revived_by_sharing():
    pool, (first, second) = full_pool(2)
    pool.release([first, second])
    pool.share(second)
    assert (pool.num_free, second.num_references) == (1, 1)
    assert pool.allocate() is first
    assert pool.find(content(1)) is second


def test_the_tail_of_a_prompt_is_lost_before_its_head():
    pool, blocks = full_pool(3)
    pool.release(blocks)
    assert [pool.allocate() for _ in range(2)] == [blocks[2], blocks[1]]
    assert pool.find(content(0)) is blocks[0]


def test_the_first_block_of_a_content_wins_and_the_second_stays_private():
    pool, (first, second) = full_pool(2)
    pool.forget(second)
    assert not pool.remember(second, content(0))
    assert pool.find(content(0)) is first
    assert second.content is None


def test_a_block_keeps_its_first_content():
    pool, (block,) = full_pool(1)
    assert not pool.remember(block, content(7))
    assert pool.find(content(7)) is None
    assert pool.find(content(0)) is block


def test_equal_tokens_of_another_group_are_another_content():
    pool, (block, other) = full_pool(2)
    pool.forget(other)
    assert pool.remember(other, (1, b"0"))
    assert pool.find((0, b"0")) is block
    assert pool.find((1, b"0")) is other


def test_a_forgotten_block_stays_with_its_holder_and_its_content_is_free_for_another():
    pool, (block, other) = full_pool(2)
    pool.forget(block)
    pool.forget(block)
    assert pool.find(content(0)) is None
    assert (block.num_references, pool.num_used) == (1, 2)
    pool.forget(other)
    assert pool.remember(other, content(0))


def test_counts_and_findability_hold_over_a_random_history():
    rng, pool = random.Random(0), BlockPool(16)
    held: list[Block] = []
    for step in range(3000):
        if held and rng.random() < 0.5:
            pool.release([held.pop(rng.randrange(len(held)))])
        elif pool.num_free and rng.random() < 0.7:
            held.append(pool.allocate())
            pool.remember(held[-1], content(step % 40))
        elif (found := pool.find(content(rng.randrange(40)))) is not None:
            pool.share(found)
            held.append(found)
        references = Counter(block.block_id for block in held)
        assert pool.num_used == len(references)
        assert pool.num_free == 16 - len(references)
        for block in pool.blocks:
            assert block.num_references == references[block.block_id]
            assert block.content is None or pool.find(block.content) is block
