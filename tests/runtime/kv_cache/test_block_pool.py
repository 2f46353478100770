import random

import pytest

from kvasir_runtime.kv_cache.block_pool import BlockPool


def test_allocated_blocks_are_distinct_and_no_longer_free():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert len({block.block_id for block in blocks}) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)


def test_allocating_more_than_is_free_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        BlockPool(2).allocate(3)


def test_a_shared_block_is_free_only_after_its_last_reference():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_releasing_too_often_is_noticed():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_a_free_block_stays_findable_until_its_memory_is_needed():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"content")
    pool.release([block])
    assert pool.find(b"content") is block
    pool.allocate(1)
    assert pool.find(b"content") is block, "the block without content goes first"
    pool.allocate(1)
    assert pool.find(b"content") is None


def test_a_found_free_block_is_revived_by_sharing():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"content")
    pool.release([block])
    pool.share([block])
    assert pool.num_free == 1
    pool.allocate(1)
    assert pool.find(b"content") is block


def test_the_tail_of_a_prompt_is_lost_before_its_head():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.remember(block, b"%d" % block.block_id)
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[2], blocks[1]]
    assert pool.find(b"%d" % blocks[0].block_id) is blocks[0]


def test_the_first_block_of_a_content_wins():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.remember(first, b"same")
    pool.remember(second, b"same")
    assert pool.find(b"same") is first
    assert second.content_hash is None


def test_forgetting_all_keeps_blocks_in_use_with_their_holders():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, b"content")
    pool.forget_all()
    assert pool.find(b"content") is None
    assert pool.num_used == 1


def test_counts_hold_over_a_random_history():
    rng, pool, held = random.Random(0), BlockPool(16), []
    for step in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        elif pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            pool.remember(blocks[0], b"%d" % step)
            held.append(blocks)
        elif held:
            held.append(list(rng.choice(held)))
            pool.share(held[-1])
        in_use = {block.block_id for blocks in held for block in blocks}
        assert pool.num_used == len(in_use)
