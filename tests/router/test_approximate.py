from kvasir_router.prefix_index.approximate import MAX_BLOCKS_PER_PROMPT, ApproximatePrefixIndex, hash_blocks, hash_seed

LONG = hash_blocks(bytes(range(100)), 10, seed=1)  # ten blocks


def test_only_full_blocks_are_hashed() -> None:
    assert len(hash_blocks(b"x" * 39, 10, seed=0)) == 3


def test_a_block_depends_on_all_before_it() -> None:
    one, other = hash_blocks(b"aaaabbbb", 4, seed=0), hash_blocks(b"ccccbbbb", 4, seed=0)
    assert one[1] != other[1]


def test_a_huge_prompt_is_hashed_up_to_a_bound() -> None:
    assert len(hash_blocks(b"x" * (MAX_BLOCKS_PER_PROMPT + 5), 1, seed=0)) == MAX_BLOCKS_PER_PROMPT


def test_seed_parts_do_not_run_together() -> None:
    assert hash_seed(b"ab", b"c") != hash_seed(b"a", b"bc")


def test_every_holder_is_scored_for_itself() -> None:
    index = ApproximatePrefixIndex(100, ttl_seconds=10)
    index.insert("a", LONG, now=0)
    index.insert("b", LONG[:4], now=0)
    assert [index.num_matched_blocks(url, LONG, now=1) for url in ("a", "b", "c")] == [10, 4, 0]


def test_each_depth_is_found() -> None:
    for depth in range(len(LONG) + 1):
        index = ApproximatePrefixIndex(100, ttl_seconds=10)
        index.insert("a", LONG[:depth], now=0)
        assert index.num_matched_blocks("a", LONG, now=0) == depth


def test_a_full_index_drops_the_tail_of_the_oldest_prompt_first() -> None:
    index = ApproximatePrefixIndex(10, ttl_seconds=100)
    index.insert("a", LONG, now=0)
    index.insert("a", hash_blocks(b"y" * 30, 10, seed=2), now=1)
    assert index.num_matched_blocks("a", LONG, now=2) == 7


def test_a_shared_beginning_outlives_its_continuations() -> None:
    index = ApproximatePrefixIndex(10, ttl_seconds=100)
    index.insert("a", LONG, now=0)
    index.insert("a", LONG[:3], now=1)
    index.insert("a", hash_blocks(b"z" * 70, 10, seed=3), now=2)
    assert index.num_matched_blocks("a", LONG, now=3) == 3


def test_a_prompt_that_is_used_again_outlives_a_newer_one() -> None:
    index = ApproximatePrefixIndex(10, ttl_seconds=100)
    newer, newest = (hash_blocks(text * 50, 10, seed=2) for text in (b"y", b"z"))
    for now, prompt in enumerate((LONG[:5], newer, LONG[:5], newest)):
        index.insert("a", prompt, now=now)
    assert [index.num_matched_blocks("a", prompt, now=4) for prompt in (LONG[:5], newer, newest)] == [5, 0, 5]


def test_blocks_past_their_lifetime_do_not_match() -> None:
    index = ApproximatePrefixIndex(100, ttl_seconds=10)
    index.insert("a", LONG, now=0)
    index.insert("a", LONG[:2], now=8)
    assert (index.num_matched_blocks("a", LONG, now=9), index.num_matched_blocks("a", LONG, now=11)) == (10, 2)


def test_expiry_frees_memory() -> None:
    index = ApproximatePrefixIndex(100, ttl_seconds=10)
    index.insert("a", LONG, now=0)
    index.expire(now=10)
    assert index.num_blocks("a") == 0


def test_the_engines_own_cache_size_bounds_what_is_believed() -> None:
    index = ApproximatePrefixIndex(100, ttl_seconds=10)
    index.insert("a", LONG, now=0, capacity_blocks=6)
    assert index.num_matched_blocks("a", LONG, now=0) == 6


def test_an_endpoint_that_is_gone_is_forgotten() -> None:
    index = ApproximatePrefixIndex(100, ttl_seconds=10)
    index.insert("a", LONG, now=0)
    index.forget("a")
    assert index.num_matched_blocks("a", LONG, now=0) == 0
