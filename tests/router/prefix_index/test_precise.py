"""Events to holders: what is matched after blocks were stored, removed, cleared, lost or guessed."""

from array import array

import pytest
from tests.router.parts import num_bytes_kept, num_calls

from kvasir_router.prefix_index.block_keys import prompt_keys
from kvasir_router.prefix_index.index import Held
from kvasir_router.prefix_index.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Digest, extra_key
from kvasir_router.prefix_index.precise import DEFAULT_BLOCK_SIZE, DOUBT_SECONDS, BlockBudget, Chains, PreciseIndex

SIZE = 4
PROMPT = list(range(100, 132))  # eight blocks


def chains_of(tokens: list[int], *sizes: int, adapter: bytes = b"", salt: bytes = b"") -> Chains:
    data = array("I", tokens).tobytes()
    return {size: prompt_keys(data, size, adapter, salt) for size in sizes or (SIZE,)}


def stored(
    tokens: list[int], first: int = 0, *, by: str = "", size: int = SIZE, adapter: bytes = b"", salt: bytes = b"",
    group: int | None = None, is_window: bool = False,
) -> BlockStored:  # fmt: skip
    """Blocks of a prompt from `first` on, as an engine that calls blocks by its own names says it."""
    digests = names(tokens, by, size)
    num_blocks = len(digests) - first
    return BlockStored(
        digests[first:], digests[first - 1] if first else None, array("I", tokens[first * size :]).tobytes(), size,
        adapter, (salt, *[b""] * (num_blocks - 1)) if salt else None, group, is_window,
    )  # fmt: skip


def names(tokens: list[int], by: str = "", size: int = SIZE) -> list[Digest]:
    return [repr((by, tokens[:end])).encode() for end in range(size, len(tokens) + 1, size)]


def index_of(*urls: str) -> PreciseIndex:
    index = PreciseIndex(BlockBudget(1000), guess_seconds=2)
    for url in urls:
        index.reset(url, 0, is_complete=True)
    return index


def test_what_was_stored_is_matched_on_every_holder() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", stored(PROMPT), 0)
    index.apply("b", stored(PROMPT[:12], by="b"), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32, "b": 12}


def test_only_what_is_alike_from_the_beginning_is_matched() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT), 0)
    assert index.match(chains_of([*PROMPT[:10], 7, *PROMPT[11:]]), 0) == {"a": 8}


def test_blocks_that_come_one_after_the_other_are_one_chain() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8]), 0)
    index.apply("a", stored(PROMPT, first=2), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}


def test_a_removed_block_ends_the_match_and_comes_back() -> None:
    index = index_of("a", "b")
    for url in ("a", "b"):
        index.apply(url, stored(PROMPT), 0)
    index.apply("a", BlockRemoved(names(PROMPT)[3:4]), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 12, "b": 32}
    index.apply("a", stored(PROMPT[:16], first=3), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32, "b": 32}


def test_a_cleared_cache_matches_nothing_and_fills_again() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT), 0)
    index.apply("a", AllBlocksCleared(), 0)
    assert index.match(chains_of(PROMPT), 0) == {}
    index.apply("a", stored(PROMPT[:8]), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 8}


def test_what_follows_an_unknown_block_is_counted_and_not_matched() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT, first=2), 0)
    assert (index.match(chains_of(PROMPT), 0), index.num_orphans, index.num_held) == ({}, 6, 0)


def test_a_removal_of_an_unknown_block_changes_nothing() -> None:
    index = index_of("a")
    index.apply("a", BlockRemoved([b"never seen"]), 0)
    assert index.num_held == 0


def test_an_event_that_comes_twice_counts_once() -> None:
    index = index_of("a")
    for _ in range(2):
        index.apply("a", stored(PROMPT), 0)
    assert index.num_held == index.num_blocks("a") == 8
    index.apply("a", BlockRemoved(names(PROMPT)), 0)
    assert (index.num_held, index.match(chains_of(PROMPT), 0)) == (0, {})


def test_salts_and_adapters_part_prompts() -> None:
    salt = extra_key(["mine"])
    index = index_of("plain", "salted", "adapted")
    index.apply("plain", stored(PROMPT), 0)
    index.apply("salted", stored(PROMPT, salt=salt), 0)
    index.apply("adapted", stored(PROMPT, adapter=b"french"), 0)
    assert index.match(chains_of(PROMPT), 0) == {"plain": 32}
    assert index.match(chains_of(PROMPT, salt=salt), 0) == {"salted": 32}
    assert index.match(chains_of(PROMPT, adapter=b"french"), 0) == {"adapted": 32}


def test_engines_may_cut_blocks_differently() -> None:
    index = index_of("fine", "coarse")
    index.apply("fine", stored(PROMPT), 0)
    index.apply("coarse", stored(PROMPT, size=16), 0)
    assert index.block_sizes() == {4, 16}
    assert index.match(chains_of(PROMPT[:20], 4, 16), 0) == {"fine": 20, "coarse": 16}


def test_an_engine_that_cuts_anew_begins_anew() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT), 0)
    index.apply("a", stored(PROMPT[:16], size=16), 0)
    assert index.match(chains_of(PROMPT, 4, 16), 0) == {"a": 16}


def test_layers_that_see_all_tokens_are_followed_and_windows_are_not() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8], group=0, is_window=True), 0)
    index.apply("a", stored(PROMPT, group=1), 0)
    index.apply("a", BlockRemoved(names(PROMPT), group=0), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}
    index.apply("a", BlockRemoved(names(PROMPT)[:1], group=1), 0)
    assert index.match(chains_of(PROMPT), 0) == {}


def test_what_layers_with_a_window_hold_is_no_prefix() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8], group=1), 0)
    index.apply("a", stored(PROMPT, group=0, is_window=True), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 8}


def test_a_model_of_windows_only_is_followed_too() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT, group=0, is_window=True), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}


def test_a_dispatch_is_believed_until_events_had_time_to_tell() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT[:8]), 0)
    index.insert("a", chains_of(PROMPT), 0)
    assert index.match(chains_of(PROMPT), 1.9) == {"a": 32}
    assert index.match(chains_of(PROMPT), 4) == {"a": 8}


def test_what_is_written_is_told_without_guesses() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT[:8]), 0)
    for url in ("a", "b"):
        index.insert(url, chains_of(PROMPT), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32, "b": 32}
    assert index.written(chains_of(PROMPT)) == {"a": Held(8)}


@pytest.mark.parametrize("fullest", [0, 1])
def test_of_several_ranks_the_one_that_has_written_most_is_told(fullest: int) -> None:
    index = index_of("a")
    index.reset("a", 0, is_complete=True, rank=1)
    for rank in range(2):
        index.apply("a", stored(PROMPT[: 16 if rank == fullest else 8]), 0, rank)
    assert index.written(chains_of(PROMPT)) == {"a": Held(16, fullest)}
    assert index.match(chains_of(PROMPT), 0) == {"a": 16}


def test_guesses_of_a_busy_router_grow_old_as_well() -> None:
    index = index_of("a")
    index.apply("a", stored([0] * SIZE), 0)
    index.insert("a", chains_of(PROMPT), 0)
    for tenth in range(1, 41):
        index.insert("a", chains_of([5] * 8), tenth / 10)
    assert index.match(chains_of(PROMPT), 4) == {}


def test_a_removal_ends_a_guess() -> None:
    index = index_of("a")
    index.apply("a", stored([0] * SIZE), 0)
    index.insert("a", chains_of(PROMPT), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}
    index.apply("a", stored(PROMPT), 0.1)
    index.apply("a", BlockRemoved(names(PROMPT)[4:]), 0.2)
    assert index.match(chains_of(PROMPT), 0.3) == {"a": 16}


def test_a_failed_dispatch_is_withdrawn_and_what_events_said_stays() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8]), 0)
    index.insert("a", chains_of(PROMPT), 0)
    index.withdraw("a", chains_of(PROMPT))
    assert index.match(chains_of(PROMPT), 0.1) == {"a": 8}


@pytest.mark.parametrize("seconds_between", [0, 2])
def test_what_a_sibling_in_flight_shares_with_a_failed_dispatch_is_expected_all_the_same(seconds_between: int) -> None:
    index = index_of("a", "b")
    index.apply("a", stored([0] * SIZE), 0)
    sibling = [*PROMPT[:12], *[7] * 20]
    index.insert("a", chains_of(sibling), 0)
    index.insert("b", chains_of(PROMPT), 0)
    index.insert("a", chains_of(PROMPT), seconds_between)
    index.withdraw("a", chains_of(PROMPT))
    assert index.match(chains_of(PROMPT), seconds_between) == {"a": 12, "b": 32}
    index.withdraw("a", chains_of(sibling))
    assert index.match(chains_of(PROMPT), seconds_between) == {"b": 32}


def test_a_prompt_that_was_sent_twice_is_expected_until_both_have_failed() -> None:
    index = index_of("a")
    index.apply("a", stored([0] * SIZE), 0)
    for _ in range(2):
        index.insert("a", chains_of(PROMPT), 0)
    index.withdraw("a", chains_of(PROMPT))
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}
    index.withdraw("a", chains_of(PROMPT))
    assert index.match(chains_of(PROMPT), 0) == {}


@pytest.mark.parametrize("times", [(2, 4), (10,)])
def test_dispatches_are_remembered_no_longer_than_guesses(times: tuple[int, ...]) -> None:
    """One that is would keep what the other leaves."""
    index, chains = index_of("a"), chains_of(PROMPT, DEFAULT_BLOCK_SIZE)
    index.insert("a", chains, 0)
    for now in times:
        index.expire(now)
    index.insert("a", chains, now)
    assert index.match(chains, now) == {"a": 32}
    index.withdraw("a", chains)
    assert index.match(chains, now) == {}


def test_guesses_for_an_endpoint_without_events_are_nobodys() -> None:
    index = index_of()
    index.insert("a", chains_of(PROMPT, 16), 0)
    assert index.match(chains_of(PROMPT, 16), 0) == {}


def test_the_usual_block_size_is_found_once_whatever_the_number_of_new_engines() -> None:
    chains = chains_of(PROMPT, DEFAULT_BLOCK_SIZE)
    few, many = (index_of(*map(str, range(num_engines))) for num_engines in (20, 40))
    resets = [num_calls(lambda index=index: index.reset("new", 0, is_complete=True)) for index in (few, many)]
    inserts = [num_calls(lambda index=index: index.insert("new", chains, 0)) for index in (few, many)]
    assert resets[1] < 2.5 * resets[0]
    assert inserts[1] == inserts[0]


def test_a_new_engine_is_guessed_in_the_blocks_of_the_others() -> None:
    index = index_of("a", "new")
    index.apply("a", stored(PROMPT), 0)
    index.insert("new", chains_of(PROMPT), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32, "new": 32}


def test_a_reset_endpoint_holds_nothing_and_nobody_inherits_its_blocks() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT), 0)
    index.apply("b", stored([0] * SIZE), 0)
    index.insert("a", chains_of([5] * 8), 0)
    index.reset("a", 0, is_complete=False)
    index.reset("new", 0, is_complete=True)
    assert index.match(chains_of(PROMPT), 0) == index.match(chains_of([5] * 8), 0) == {}
    assert [index.is_complete(url) for url in ("a", "new", "gone")] == [False, True, False]


def test_a_forgotten_endpoints_blocks_are_freed_and_its_bit_is_used_again() -> None:
    index = index_of("a")

    def hold_and_forget() -> None:
        for now in range(0, 2000, 10):
            tokens = [now, *PROMPT]
            index.apply("a", stored(tokens), now)
            index.insert("a", chains_of([5] * 8), now)
            index.reset("a", now, is_complete=True)
            index.expire(now)
            assert index.match(chains_of([5] * 8), now) == index.match(chains_of(tokens), now) == {}

    assert num_bytes_kept(hold_and_forget) < 10_000  # a block takes 200
    assert (index.num_held, index.num_bits) == (0, 2)


def test_a_bit_is_not_used_again_while_a_guess_may_have_it() -> None:
    index = index_of("a", "b")
    for url in ("a", "b"):
        index.apply(url, stored([0] * SIZE), 0)
    index.insert("a", chains_of(PROMPT), 1)
    index.forget("a")
    index.expire(1)
    index.reset("new", 1, is_complete=True)
    assert index.match(chains_of(PROMPT), 1) == {}


def test_events_free_what_is_void_little_by_little() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(list(range(SIZE * 80))), 0)
    index.forget("a")
    assert index.num_held == 80
    for num_left in (48, 16, 0):
        index.apply("b", BlockRemoved([]), 0)
        assert index.num_held == num_left


def test_after_a_loss_what_was_held_is_doubted_for_a_bounded_time() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT), 0)
    index.doubt("a", 10)
    index.apply("a", stored(PROMPT[:8]), 20)
    assert not index.is_complete("a")
    index.expire(10 + DOUBT_SECONDS - 0.1)
    assert index.match(chains_of(PROMPT), 20) == {"a": 32}
    index.expire(10 + DOUBT_SECONDS)
    assert index.match(chains_of(PROMPT), 20) == {"a": 8}
    assert index.num_held == 2


def test_doubted_blocks_can_be_removed_and_continued() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:16]), 0)
    index.doubt("a", 0)
    index.apply("a", stored(PROMPT, first=4), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 32}
    index.apply("a", BlockRemoved(names(PROMPT)[2:3]), 0)
    assert index.match(chains_of(PROMPT), 0) == {"a": 8}


def test_a_second_loss_ends_the_first_ones_doubt() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8]), 0)
    index.doubt("a", 0)
    index.apply("a", stored(PROMPT[:16], first=2), 0)
    index.doubt("a", 100)
    index.expire(101)
    assert (index.num_blocks("a"), index.num_held) == (2, 2)


def test_a_doubted_block_that_is_named_again_while_the_others_are_freed_stays() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT), 0)
    index.doubt("a", 0)
    index.doubt("a", 0)  # which ends the first doubt
    index.apply("a", stored(PROMPT[:4]), 0)
    index.expire(1)
    assert (index.match(chains_of(PROMPT), 1), index.num_held) == ({"a": 4}, 1)


def test_a_cleared_cache_is_known_completely_again() -> None:
    index = index_of("a")
    index.doubt("a", 0)
    index.apply("a", AllBlocksCleared(), 0)
    assert index.is_complete("a")


def test_memory_is_bounded_and_what_is_beyond_is_not_believed() -> None:
    index = PreciseIndex(BlockBudget(5), guess_seconds=2)
    index.reset("a", 0, is_complete=True)
    index.apply("a", stored(PROMPT), 0)
    assert (index.num_held, index.num_refused) == (5, 3)
    assert (index.match(chains_of(PROMPT), 0), index.is_complete("a")) == ({"a": 20}, False)


def test_memory_is_bounded_for_all_indexes_together() -> None:
    budget = BlockBudget(10)
    one, other = PreciseIndex(budget), PreciseIndex(budget)
    for index in (one, other):
        index.reset("a", 0, is_complete=True)
        index.apply("a", stored(PROMPT), 0)
    assert (one.num_held, other.num_held, other.num_refused) == (8, 2, 6)
    one.doubt("a", 0)
    one.apply("a", stored(PROMPT[:8]), 0)
    one.forget("a")
    one.expire(DOUBT_SECONDS)
    assert budget.num_held == other.num_held == 2
    other.apply("a", stored(PROMPT), 0)
    assert other.num_held == 8


def test_seventy_endpoints_are_told_apart() -> None:
    urls = [f"engine-{number}" for number in range(70)]
    index = index_of(*urls)
    for number, url in enumerate(urls):
        index.apply(url, stored(PROMPT[: number % 8 * 4 + 4]), 0)
    assert index.match(chains_of(PROMPT), 0) == {url: number % 8 * 4 + 4 for number, url in enumerate(urls)}


@pytest.fixture
def two_ranks() -> PreciseIndex:
    """Of one endpoint: rank 0 holds two blocks of the prompt, rank 1 five."""
    index = index_of("a")
    index.reset("a", 0, is_complete=True, rank=1)
    index.apply("a", stored(PROMPT[:8]), 0)
    index.apply("a", stored(PROMPT[:20]), 0, rank=1)
    return index


def test_a_match_is_what_the_best_rank_holds(two_ranks: PreciseIndex) -> None:
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 20}
    two_ranks.apply("a", BlockRemoved(names(PROMPT[:20]), None), 0, rank=1)
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 8}


def test_a_match_is_what_the_best_rank_holds_in_blocks_of_any_size() -> None:
    """Until its events tell, a rank is taken to cut prompts as most engines do."""
    index = index_of("a", "b", "c")
    index.reset("a", 0, is_complete=True, rank=1)
    for url in ("b", "c"):
        index.apply(url, stored([1] * 16, by=url, size=8), 0)
    index.apply("a", stored(PROMPT[:8]), 0, rank=1)
    chains = chains_of(PROMPT, SIZE, 8)
    assert index.match(chains, 0) == {"a": 8}
    index.insert("a", chains, 0)
    assert index.match(chains, 0) == {"a": 32}


def test_blocks_of_two_ranks_are_not_put_together() -> None:
    index = index_of("a")
    index.reset("a", 0, is_complete=True, rank=1)
    index.apply("a", stored(PROMPT[:8]), 0)
    index.apply("a", stored(PROMPT), 0, rank=1)
    index.apply("a", BlockRemoved(names(PROMPT[:4]), None), 0, rank=1)
    assert index.match(chains_of(PROMPT), 0) == {"a": 8}, "the rest of it is where the beginning is not"


def test_an_endpoint_is_known_when_all_its_ranks_are(two_ranks: PreciseIndex) -> None:
    assert (two_ranks.is_complete("a"), two_ranks.num_blocks("a")) == (True, 7)
    two_ranks.doubt("a", 0, rank=1)
    assert (two_ranks.is_complete("a"), two_ranks.match(chains_of(PROMPT), 0)) == (False, {"a": 20})
    two_ranks.reset("a", 0, is_complete=False, rank=1)
    assert (two_ranks.is_complete("a"), two_ranks.match(chains_of(PROMPT), 0)) == (False, {"a": 8})
    two_ranks.reset("a", 0, is_complete=True, rank=1)
    assert two_ranks.is_complete("a")


def test_a_rank_that_is_gone_takes_its_blocks_along(two_ranks: PreciseIndex) -> None:
    two_ranks.forget("a", rank=1)
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 8}
    two_ranks.forget("a")
    assert (two_ranks.match(chains_of(PROMPT), 0), two_ranks.is_complete("a")) == ({}, False)


def test_a_prompt_is_expected_in_whichever_rank_and_withdrawn_from_all(two_ranks: PreciseIndex) -> None:
    two_ranks.insert("a", chains_of(PROMPT), 0)
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 32}
    two_ranks.reset("a", 0, is_complete=True)  # another is the first now
    two_ranks.insert("a", chains_of(PROMPT), 0)
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 32}
    two_ranks.withdraw("a", chains_of(PROMPT))
    assert two_ranks.match(chains_of(PROMPT), 0) == {"a": 20}
