import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.router.parts import num_bytes_kept

from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.approximate import (
    BYTES_PER_BLOCK,
    MAX_BLOCKS_PER_PROMPT,
    THREAD_BYTES,
    ApproximatePrefixIndex,
    BlockHashes,
    PrefixMemory,
    hash_blocks,
)

LONG = hash_blocks(bytes(range(100)), 10, seed=b"1")  # ten blocks


def index(max_blocks: int = 100, ttl_seconds: float = 10.0) -> ApproximatePrefixIndex:
    """Its blocks are of one token, so that matches are depths."""
    return ApproximatePrefixIndex(max_blocks, ttl_seconds, block_tokens=1, bytes_per_token=10.0)


def key(hashes: tuple[int, ...]) -> BlockHashes:
    return BlockHashes(len(hashes), hashes)


def insert(into: ApproximatePrefixIndex, url: str, hashes: tuple[int, ...], now: float) -> None:
    into.insert(url, key(hashes), now, capacity_tokens=None)


def depth(of: ApproximatePrefixIndex, hashes: tuple[int, ...], now: float, url: str = "a") -> int:
    return of.match(key(hashes), now).get(url, 0)


def test_only_full_blocks_are_hashed() -> None:
    assert len(hash_blocks(b"x" * 39, 10, seed=b"")) == 3


def test_a_block_depends_on_all_before_it() -> None:
    one, other = hash_blocks(b"aaaabbbb", 4, seed=b""), hash_blocks(b"ccccbbbb", 4, seed=b"")
    assert one[1] != other[1]


def test_a_huge_prompt_is_hashed_up_to_a_bound() -> None:
    assert len(hash_blocks(b"x" * (MAX_BLOCKS_PER_PROMPT + 5), 1, seed=b"")) == MAX_BLOCKS_PER_PROMPT


def test_prompts_of_another_seed_share_no_block() -> None:
    assert not set(LONG) & set(hash_blocks(bytes(range(100)), 10, seed=b"2"))


@pytest.mark.anyio
@pytest.mark.parametrize(("num_bytes_more", "is_in_loop"), [(0, True), (1, False)])
async def test_what_takes_long_to_hash_is_hashed_in_a_thread(num_bytes_more: int, is_in_loop: bool) -> None:
    """While the only one is busy."""
    gate = threading.Event()
    executor = ThreadPoolExecutor(max_workers=1)
    executor.submit(gate.wait, 10)
    asyncio.get_running_loop().set_default_executor(executor)
    content = b"x" * (THREAD_BYTES + num_bytes_more)
    made = ApproximatePrefixIndex(100, 10.0, block_tokens=1024, bytes_per_token=4.0)
    hashing = asyncio.create_task(made.key(Prompt(content, is_token_ids=False, seed=b"s")))
    await asyncio.sleep(0)
    assert hashing.done() is is_in_loop
    gate.set()
    assert (await hashing).hashes == hash_blocks(content, 4096, b"s")


@pytest.mark.anyio
@pytest.mark.parametrize(("is_token_ids", "num_tokens", "num_blocks"), [(False, 50, 12), (True, 25, 6)])
async def test_text_is_counted_by_its_bytes_and_token_ids_exactly(
    is_token_ids: bool, num_tokens: int, num_blocks: int
) -> None:
    made = ApproximatePrefixIndex(100, 10.0, block_tokens=4, bytes_per_token=2.0)
    found = await made.key(Prompt(b"x" * 100, is_token_ids, seed=b""))
    assert (found.num_tokens, len(found.hashes)) == (num_tokens, num_blocks)


def test_every_holder_is_matched_for_itself_and_others_not_at_all() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    insert(one, "b", LONG[:4], now=0)
    insert(one, "c", hash_blocks(b"y" * 30, 10, seed=b"2"), now=0)
    assert one.match(key(LONG), now=1) == {"a": 10, "b": 4}


def test_many_holders_are_matched_each_to_its_own_depth() -> None:
    one = index()
    depths = {str(number): number % (len(LONG) + 1) for number in range(70)}
    for url, num_blocks in depths.items():
        insert(one, url, LONG[:num_blocks], now=0)
    one.withdraw("69")
    del depths["69"]
    assert one.match(key(LONG), now=1) == {url: num_blocks for url, num_blocks in depths.items() if num_blocks}


def test_matches_are_in_tokens() -> None:
    one = ApproximatePrefixIndex(100, 10.0, block_tokens=64, bytes_per_token=1.0)
    insert(one, "a", LONG[:3], now=0)
    assert one.match(key(LONG), now=1) == {"a": 192}


def test_each_depth_is_found() -> None:
    for number in range(len(LONG) + 1):
        one = index()
        insert(one, "a", LONG[:number], now=0)
        assert depth(one, LONG, now=0) == number


def test_a_full_index_drops_the_tail_of_the_oldest_prompt_first() -> None:
    one = index(10, ttl_seconds=100)
    insert(one, "a", LONG, now=0)
    insert(one, "a", hash_blocks(b"y" * 30, 10, seed=b"2"), now=1)
    assert depth(one, LONG, now=2) == 7


def test_a_shared_beginning_outlives_its_continuations() -> None:
    one = index(10, ttl_seconds=100)
    insert(one, "a", LONG, now=0)
    insert(one, "a", LONG[:3], now=1)
    insert(one, "a", hash_blocks(b"z" * 70, 10, seed=b"3"), now=2)
    assert depth(one, LONG, now=3) == 3


def test_a_prompt_that_is_used_again_outlives_a_newer_one() -> None:
    one = index(10, ttl_seconds=100)
    newer, newest = (hash_blocks(text * 50, 10, seed=b"2") for text in (b"y", b"z"))
    for now, prompt in enumerate((LONG[:5], newer, LONG[:5], newest)):
        insert(one, "a", prompt, now=now)
    assert [depth(one, prompt, now=4) for prompt in (LONG[:5], newer, newest)] == [5, 0, 5]


def test_blocks_past_their_lifetime_do_not_match() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    insert(one, "a", LONG[:2], now=8)
    assert (depth(one, LONG, now=9), depth(one, LONG, now=11)) == (10, 2)


def test_expiry_frees_memory() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    one.expire(now=10)
    assert one.num_blocks("a") == 0


def test_the_engines_own_cache_size_bounds_what_is_believed() -> None:
    one = index()
    one.insert("a", key(LONG), now=0, capacity_tokens=6)
    assert depth(one, LONG, now=0) == 6


def test_an_endpoint_that_is_gone_is_forgotten() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    one.withdraw("a")
    assert depth(one, LONG, now=0) == 0


def test_a_dispatch_that_failed_is_withdrawn_and_no_other() -> None:
    one, other = index(), hash_blocks(b"y" * 30, 10, seed=b"2")
    for hashes in (LONG, other):
        insert(one, "a", hashes, now=0)
    insert(one, "b", LONG, now=0)
    one.withdraw("a", key(LONG))
    assert (one.match(key(LONG), now=1), depth(one, other, now=1)) == ({"b": 10}, 3)


def test_many_endpoints_with_many_depths_are_all_found() -> None:
    one, depths = index(), {f"e{number}": number % 11 for number in range(70)}
    for url, number in depths.items():
        insert(one, url, LONG[:number], now=0)
    assert one.match(key(LONG), now=0) == {url: number for url, number in depths.items() if number}


def test_what_was_cached_before_a_failed_dispatch_stays() -> None:
    one = index()
    insert(one, "a", LONG[:4], now=0)
    insert(one, "a", LONG, now=1)
    one.withdraw("a", key(LONG))
    assert depth(one, LONG, now=2) == 4


def test_what_a_later_dispatch_shares_with_a_failed_one_stays() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    insert(one, "a", LONG[:6], now=1)
    one.withdraw("a", key(LONG))
    assert depth(one, LONG, now=2) == 6


def test_a_dispatch_of_the_same_prompt_that_did_not_fail_keeps_it() -> None:
    one = index()
    insert(one, "a", LONG, now=0)
    insert(one, "a", LONG, now=1)
    one.withdraw("a", key(LONG))
    assert depth(one, LONG, now=2) == 10


def test_an_unknown_endpoint_or_dispatch_can_be_withdrawn() -> None:
    one = index()
    one.withdraw("a")
    insert(one, "a", LONG, now=0)
    one.withdraw("a", key(hash_blocks(b"y" * 30, 10, seed=b"2")))
    assert depth(one, LONG, now=1) == 10


def test_the_place_of_a_gone_endpoint_is_taken_by_the_next_without_its_blocks() -> None:
    one = index()
    for url in ("a", "b"):
        insert(one, url, LONG, now=0)
    one.withdraw("a")
    insert(one, "c", LONG[:3], now=1)
    assert one.match(key(LONG), now=1) == {"b": 10, "c": 3}


def test_all_endpoints_together_are_bounded_in_bytes() -> None:
    bounded = ApproximatePrefixIndex(100, 10.0, 1, 10.0, PrefixMemory(12 * BYTES_PER_BLOCK))
    for url in ("a", "b", "a"):
        insert(bounded, url, LONG, now=0)
    assert (bounded.num_blocks("a"), bounded.num_blocks("b")) == (6, 6)


def test_indexes_that_share_a_memory_have_equal_parts_of_it_and_give_theirs_back() -> None:
    memory = PrefixMemory(12 * BYTES_PER_BLOCK)
    one, other = [ApproximatePrefixIndex(100, 10.0, 1, 10.0, memory) for _ in range(2)]
    insert(one, "a", LONG, now=0)
    insert(other, "b", LONG, now=5)
    assert (one.num_blocks("a"), other.num_blocks("b")) == (10, 6)
    one.expire(now=5)
    assert one.num_blocks("a") == 6, "nothing was sent there since the other came"
    one.expire(now=10)
    insert(other, "b", LONG, now=10)
    assert (one.num_blocks("a"), other.num_blocks("b")) == (0, 10)


def test_many_dispatches_of_few_blocks_do_not_grow_it() -> None:
    one = index(10, ttl_seconds=1e9)

    def dispatch() -> None:
        for now in range(1000):
            insert(one, "a", LONG[:5], now=now)

    assert num_bytes_kept(dispatch) < 10_000  # a dispatch takes more than 100
    assert depth(one, LONG, now=1000) == 5


def test_random_use_agrees_with_plain_lists() -> None:
    """The twin: per endpoint a list of blocks in order of their last use."""
    source, one = random.Random(7), index(25, ttl_seconds=1e9)
    prompts = [hash_blocks(bytes([number % 3] * 40 + [number] * 60), 10, seed=b"") for number in range(12)]
    twins: dict[str, list[int]] = {url: [] for url in "abc"}
    for now in range(3000):
        url, hashes = source.choice("abc"), source.choice(prompts)[: source.randint(1, 10)]
        insert(one, url, hashes, now=now)
        twin = [block for block in twins[url] if block not in hashes] + list(reversed(hashes))
        twins[url] = twin[-25:]
        asked = source.choice(prompts)
        expected = {url: held(twin, asked) for url, twin in twins.items()}
        assert one.match(key(asked), now) == {url: number for url, number in expected.items() if number}


def held(blocks: list[int], asked: tuple[int, ...]) -> int:
    return next((number for number, block in enumerate(asked) if block not in blocks), len(asked))


def test_prompts_that_begin_alike_call_their_beginning_the_same() -> None:
    one, other = BlockHashes(330, (1, 2, 3, 4, 5)), BlockHashes(200, (1, 2, 3))
    assert one.beginning(128) == other.beginning(128) == 2
    assert one.beginning(320) == 5
    assert one.beginning(0) is other.beginning(256) is None
