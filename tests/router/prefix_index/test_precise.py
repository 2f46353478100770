"""Events to holders: what is matched after blocks were stored, removed, cleared or lost."""

from array import array

import pytest
from tests.router.parts import num_bytes_kept, num_calls

from kvasir_router.prefix_index.block_keys import prompt_keys
from kvasir_router.prefix_index.index import Held
from kvasir_router.prefix_index.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Digest, extra_key
from kvasir_router.prefix_index.precise import DOUBT_SECONDS, BlockBudget, Chains, PreciseIndex

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


def held(index: PreciseIndex, chains: Chains) -> dict[str, int]:
    return {url: one.num_tokens for url, one in index.match(chains).items()}


def index_of(*urls: str) -> PreciseIndex:
    index = PreciseIndex(BlockBudget(1000))
    for url in urls:
        index.reset(url, is_complete=True)
    return index


def test_what_was_stored_is_matched_on_every_holder() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", stored(PROMPT))
    index.apply("b", stored(PROMPT[:12], by="b"))
    assert held(index, chains_of(PROMPT)) == {"a": 32, "b": 12}


def test_only_what_is_alike_from_the_beginning_is_matched() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT))
    assert held(index, chains_of([*PROMPT[:10], 7, *PROMPT[11:]])) == {"a": 8}


def test_blocks_that_come_one_after_the_other_are_one_chain() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8]))
    index.apply("a", stored(PROMPT, first=2))
    assert held(index, chains_of(PROMPT)) == {"a": 32}


def test_a_removed_block_ends_the_match_and_comes_back() -> None:
    index = index_of("a", "b")
    for url in ("a", "b"):
        index.apply(url, stored(PROMPT))
    index.apply("a", BlockRemoved(names(PROMPT)[3:4]))
    assert held(index, chains_of(PROMPT)) == {"a": 12, "b": 32}
    index.apply("a", stored(PROMPT[:16], first=3))
    assert held(index, chains_of(PROMPT)) == {"a": 32, "b": 32}


def test_a_cleared_cache_matches_nothing_and_fills_again() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT))
    index.apply("a", AllBlocksCleared())
    assert held(index, chains_of(PROMPT)) == {}
    index.apply("a", stored(PROMPT[:8]))
    assert held(index, chains_of(PROMPT)) == {"a": 8}


def test_what_follows_an_unknown_block_is_counted_and_not_matched() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT, first=2))
    assert (held(index, chains_of(PROMPT)), index.num_orphans, index.num_held) == ({}, 6, 0)


def test_a_removal_of_an_unknown_block_changes_nothing() -> None:
    index = index_of("a")
    index.apply("a", BlockRemoved([b"never seen"]))
    assert index.num_held == 0


def test_an_event_that_comes_twice_counts_once() -> None:
    index = index_of("a")
    for _ in range(2):
        index.apply("a", stored(PROMPT))
    assert index.num_held == index.num_blocks("a") == 8
    index.apply("a", BlockRemoved(names(PROMPT)))
    assert (index.num_held, held(index, chains_of(PROMPT))) == (0, {})


def test_salts_and_adapters_part_prompts() -> None:
    salt = extra_key(["mine"])
    index = index_of("plain", "salted", "adapted")
    index.apply("plain", stored(PROMPT))
    index.apply("salted", stored(PROMPT, salt=salt))
    index.apply("adapted", stored(PROMPT, adapter=b"french"))
    assert held(index, chains_of(PROMPT)) == {"plain": 32}
    assert held(index, chains_of(PROMPT, salt=salt)) == {"salted": 32}
    assert held(index, chains_of(PROMPT, adapter=b"french")) == {"adapted": 32}


def test_engines_may_cut_blocks_differently() -> None:
    index = index_of("fine", "coarse")
    index.apply("fine", stored(PROMPT))
    index.apply("coarse", stored(PROMPT, size=16))
    assert index.block_sizes() == {4, 16}
    assert held(index, chains_of(PROMPT[:20], 4, 16)) == {"fine": 20, "coarse": 16}


def test_an_engine_that_cuts_anew_begins_anew() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT))
    index.apply("a", stored(PROMPT[:16], size=16))
    assert held(index, chains_of(PROMPT, 4, 16)) == {"a": 16}


def test_layers_that_see_all_tokens_are_followed_and_windows_are_not() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8], group=0, is_window=True))
    index.apply("a", stored(PROMPT, group=1))
    index.apply("a", BlockRemoved(names(PROMPT), group=0))
    assert held(index, chains_of(PROMPT)) == {"a": 32}
    index.apply("a", BlockRemoved(names(PROMPT)[:1], group=1))
    assert held(index, chains_of(PROMPT)) == {}


def test_what_layers_with_a_window_hold_is_no_prefix() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8], group=1))
    index.apply("a", stored(PROMPT, group=0, is_window=True))
    assert held(index, chains_of(PROMPT)) == {"a": 8}


def test_a_model_of_windows_only_is_followed_too() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT, group=0, is_window=True))
    assert held(index, chains_of(PROMPT)) == {"a": 32}


@pytest.mark.parametrize("fullest", [0, 1])
def test_of_several_ranks_the_one_that_has_written_most_is_told(fullest: int) -> None:
    index = index_of("a")
    index.reset("a", is_complete=True, rank=1)
    for rank in range(2):
        index.apply("a", stored(PROMPT[: 16 if rank == fullest else 8]), rank)
    assert index.match(chains_of(PROMPT)) == {"a": Held(16, fullest)}
    assert held(index, chains_of(PROMPT)) == {"a": 16}


def test_the_usual_block_size_is_found_once_whatever_the_number_of_new_engines() -> None:
    few, many = (index_of(*map(str, range(num_engines))) for num_engines in (20, 40))
    resets = [num_calls(lambda index=index: index.reset("new", is_complete=True)) for index in (few, many)]
    assert resets[1] < 2.5 * resets[0]


def test_a_reset_endpoint_holds_nothing_and_nobody_inherits_its_blocks() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(PROMPT))
    index.apply("b", stored([0] * SIZE))
    index.reset("a", is_complete=False)
    index.reset("new", is_complete=True)
    assert held(index, chains_of(PROMPT)) == {}
    assert [index.is_complete(url) for url in ("a", "new", "gone")] == [False, True, False]


def test_a_forgotten_endpoints_blocks_are_freed_and_its_bit_is_used_again() -> None:
    index = index_of("a")

    def hold_and_forget() -> None:
        for now in range(0, 2000, 10):
            tokens = [now, *PROMPT]
            index.apply("a", stored(tokens))
            index.reset("a", is_complete=True)
            index.expire(now)
            assert held(index, chains_of(tokens)) == {}

    assert num_bytes_kept(hold_and_forget) < 10_000  # a block takes 200
    assert (index.num_held, index.num_bits) == (0, 2)


def test_events_free_what_is_void_little_by_little() -> None:
    index = index_of("a", "b")
    index.apply("a", stored(list(range(SIZE * 80))))
    index.forget("a")
    assert index.num_held == 80
    for num_left in (48, 16, 0):
        index.apply("b", BlockRemoved([]))
        assert index.num_held == num_left


def test_after_a_loss_what_was_held_is_doubted_for_a_bounded_time() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT))
    index.doubt("a", 10)
    index.apply("a", stored(PROMPT[:8]))
    assert not index.is_complete("a")
    index.expire(10 + DOUBT_SECONDS - 0.1)
    assert held(index, chains_of(PROMPT)) == {"a": 32}
    index.expire(10 + DOUBT_SECONDS)
    assert held(index, chains_of(PROMPT)) == {"a": 8}
    assert index.num_held == 2


def test_doubted_blocks_can_be_removed_and_continued() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:16]))
    index.doubt("a", 0)
    index.apply("a", stored(PROMPT, first=4))
    assert held(index, chains_of(PROMPT)) == {"a": 32}
    index.apply("a", BlockRemoved(names(PROMPT)[2:3]))
    assert held(index, chains_of(PROMPT)) == {"a": 8}


def test_a_second_loss_ends_the_first_ones_doubt() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT[:8]))
    index.doubt("a", 0)
    index.apply("a", stored(PROMPT[:16], first=2))
    index.doubt("a", 100)
    index.expire(101)
    assert (index.num_blocks("a"), index.num_held) == (2, 2)


def test_a_doubted_block_that_is_named_again_while_the_others_are_freed_stays() -> None:
    index = index_of("a")
    index.apply("a", stored(PROMPT))
    index.doubt("a", 0)
    index.doubt("a", 0)  # which ends the first doubt
    index.apply("a", stored(PROMPT[:4]))
    index.expire(1)
    assert (held(index, chains_of(PROMPT)), index.num_held) == ({"a": 4}, 1)


def test_a_cleared_cache_is_known_completely_again() -> None:
    index = index_of("a")
    index.doubt("a", 0)
    index.apply("a", AllBlocksCleared())
    assert index.is_complete("a")


def test_memory_is_bounded_and_what_is_beyond_is_not_believed() -> None:
    index = PreciseIndex(BlockBudget(5))
    index.reset("a", is_complete=True)
    index.apply("a", stored(PROMPT))
    assert (index.num_held, index.num_refused) == (5, 3)
    assert (held(index, chains_of(PROMPT)), index.is_complete("a")) == ({"a": 20}, False)


def test_memory_is_bounded_for_all_indexes_together() -> None:
    budget = BlockBudget(10)
    one, other = PreciseIndex(budget), PreciseIndex(budget)
    for index in (one, other):
        index.reset("a", is_complete=True)
        index.apply("a", stored(PROMPT))
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
        index.apply(url, stored(PROMPT[: number % 8 * 4 + 4]))
    assert held(index, chains_of(PROMPT)) == {url: number % 8 * 4 + 4 for number, url in enumerate(urls)}


@pytest.fixture
def two_ranks() -> PreciseIndex:
    """Of one endpoint: rank 0 holds two blocks of the prompt, rank 1 five."""
    index = index_of("a")
    index.reset("a", is_complete=True, rank=1)
    index.apply("a", stored(PROMPT[:8]))
    index.apply("a", stored(PROMPT[:20]), rank=1)
    return index


def test_a_match_is_what_the_best_rank_holds(two_ranks: PreciseIndex) -> None:
    assert held(two_ranks, chains_of(PROMPT)) == {"a": 20}
    two_ranks.apply("a", BlockRemoved(names(PROMPT[:20]), None), rank=1)
    assert held(two_ranks, chains_of(PROMPT)) == {"a": 8}


def test_a_match_is_what_the_best_rank_holds_in_blocks_of_any_size() -> None:
    """Until its events tell, a rank is taken to cut prompts as most engines do."""
    index = index_of("a", "b", "c")
    index.reset("a", is_complete=True, rank=1)
    for url in ("b", "c"):
        index.apply(url, stored([1] * 16, by=url, size=8))
    index.apply("a", stored(PROMPT[:8]), rank=1)
    chains = chains_of(PROMPT, SIZE, 8)
    assert held(index, chains) == {"a": 8}


def test_blocks_of_two_ranks_are_not_put_together() -> None:
    index = index_of("a")
    index.reset("a", is_complete=True, rank=1)
    index.apply("a", stored(PROMPT[:8]))
    index.apply("a", stored(PROMPT), rank=1)
    index.apply("a", BlockRemoved(names(PROMPT[:4]), None), rank=1)
    assert held(index, chains_of(PROMPT)) == {"a": 8}, "the rest of it is where the beginning is not"


def test_an_endpoint_is_known_when_all_its_ranks_are(two_ranks: PreciseIndex) -> None:
    assert (two_ranks.is_complete("a"), two_ranks.num_blocks("a")) == (True, 7)
    two_ranks.doubt("a", 0, rank=1)
    assert (two_ranks.is_complete("a"), held(two_ranks, chains_of(PROMPT))) == (False, {"a": 20})
    two_ranks.reset("a", is_complete=False, rank=1)
    assert (two_ranks.is_complete("a"), held(two_ranks, chains_of(PROMPT))) == (False, {"a": 8})
    two_ranks.reset("a", is_complete=True, rank=1)
    assert two_ranks.is_complete("a")


def test_a_rank_that_is_gone_takes_its_blocks_along(two_ranks: PreciseIndex) -> None:
    two_ranks.forget("a", rank=1)
    assert held(two_ranks, chains_of(PROMPT)) == {"a": 8}
    two_ranks.forget("a")
    assert (held(two_ranks, chains_of(PROMPT)), two_ranks.is_complete("a")) == ({}, False)
