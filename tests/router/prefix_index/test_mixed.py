"""Precise where events tell, approximate where they do not, and the longer of both in between."""

import asyncio
import threading
from array import array
from collections.abc import Iterator

import msgspec
import pytest
from tests.router.prefix_index.test_tokens import Remembering, card, ids, words

from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.prefix_index.index import Held
from kvasir_router.prefix_index.kv_events import BlockStored, extra_key
from kvasir_router.prefix_index.mixed import INLINE_BYTES, JUST_SENT_SECONDS, MixedIndex, MixedKey, Threads
from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_router.prefix_index.tokens import CHUNK_CHARACTERS, PieceCache, PromptTokenizer

pytestmark = pytest.mark.anyio
SIZE = 16


def token_prompt(num_tokens: int, first: int = 1, model: str = "base", salt: str | None = None) -> Prompt:
    raw = {} if salt is None else {"cache_salt": msgspec.Raw(msgspec.json.encode(salt))}
    return Prompt(array("I", [first] * num_tokens).tobytes(), True, model.encode(), model=model, **raw)


def stored(tokens: "array[int]", adapter: bytes = b"", salt: bytes = b"") -> BlockStored:
    num_blocks = len(tokens) // SIZE
    keys = (salt, *[b""] * (num_blocks - 1)) if salt else None
    return BlockStored(list(range(num_blocks)), None, tokens[: num_blocks * SIZE].tobytes(), SIZE, adapter, keys)


class Parts:
    def __init__(self) -> None:
        self.withdrawn: list[str] = []
        self.precise = PreciseIndex(BlockBudget(10_000))
        self.threads = Threads()
        approximate = ApproximatePrefixIndex(1000, 100, block_tokens=SIZE, bytes_per_token=4)
        base = frozenset({"base"})
        self.index = MixedIndex(approximate, self.precise, self.threads, lambda: base, self.withdrawn.append)


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    made.threads.close()


async def test_events_overrule_the_guess_where_they_tell_all(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    key = await parts.index.key(token_prompt(64))
    for url in ("told", "untold"):
        parts.index.insert(url, key, 0, None)
    assert parts.index.match(key, 10) == {"untold": 64}
    parts.precise.apply("told", stored(array("I", [1] * 32)))
    assert parts.index.match(key, 10) == {"told": 32, "untold": 64}


async def test_what_was_just_sent_is_expected_until_events_had_time_to_tell(parts: Parts) -> None:
    for url in ("told", "failed"):
        parts.precise.reset(url, is_complete=True)
    first, second = [await parts.index.key(token_prompt(num_tokens)) for num_tokens in (64, 128)]
    for url in ("told", "failed"):
        parts.index.insert(url, first, 0, None)
    parts.index.withdraw("failed", first)
    assert parts.index.match(second, JUST_SENT_SECONDS - 0.1) == {"told": 64}
    assert parts.index.match(second, JUST_SENT_SECONDS) == {}


async def test_only_events_say_what_is_written(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(array("I", [1] * 32)))
    key = await parts.index.key(token_prompt(64))
    unknown = await parts.index.key(Prompt(b"x" * 640, False, b"", model="base"))
    for url in ("told", "untold"):
        parts.index.insert(url, key, 0, None)
        parts.index.insert(url, unknown, 0, None)
    assert parts.index.match(key, 0) == {"told": 64, "untold": 64}
    assert (parts.index.written(key), parts.index.written(unknown)) == ({"told": Held(32)}, {})


async def test_where_the_beginning_is_not_known_the_longer_match_counts(parts: Parts) -> None:
    parts.precise.reset("partly", is_complete=False)
    short, long = [await parts.index.key(token_prompt(num_tokens)) for num_tokens in (32, 64)]
    parts.index.insert("partly", short, 0, None)
    assert parts.index.match(long, 50) == {"partly": 32}
    parts.precise.apply("partly", stored(array("I", [1] * 48)))
    assert parts.index.match(long, 50) == {"partly": 48}


async def test_an_adapters_prompts_are_its_own(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(array("I", [1] * 32)))
    assert parts.index.match(await parts.index.key(token_prompt(32, model="french")), 0) == {}
    parts.precise.apply("told", stored(array("I", [1] * 32), adapter=b"french"))
    assert parts.index.match(await parts.index.key(token_prompt(32, model="french")), 0) == {"told": 32}


async def test_a_salted_prompt_is_its_own(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(array("I", [1] * 32), salt=extra_key(["mine"])))
    keys = [await parts.index.key(token_prompt(48, salt=salt)) for salt in ("mine", "yours", None)]
    assert [parts.index.match(key, 0) for key in keys] == [{"told": 32}, {}, {}]


async def test_text_is_matched_by_its_tokens_once_the_tokenizer_is_known(parts: Parts) -> None:
    tokenizer = PromptTokenizer(card(), PieceCache(10**6))
    prompt = Prompt(b"def hello(name): return name " * 20, False, b"", is_text=True, model="base")
    tokens = array("I", ids(tokenizer.tokens(prompt)))
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(tokens))
    assert parts.index.match(await parts.index.key(prompt), 0) == {}
    parts.index.use_tokenizer(tokenizer)
    key = await parts.index.key(prompt)
    assert parts.index.match(key, 0) == {"told": len(tokens) // SIZE * SIZE}
    assert key.num_tokens == len(tokens)


async def test_what_cannot_be_tokenised_is_guessed_even_where_events_tell_all(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    key = await parts.index.key(Prompt(b"x" * 640, False, b"", model="base"))
    parts.index.insert("told", key, 0, None)
    assert parts.index.match(key, 10) == {"told": 160}


async def test_a_guess_is_no_longer_than_the_prompt_is_known_to_be(parts: Parts) -> None:
    parts.index.use_tokenizer(PromptTokenizer(card(words(), None), PieceCache(10**6)))  # one unknown word
    key = await parts.index.key(Prompt(b"x" * 640, False, b"", is_text=True, model="base"))
    parts.index.insert("untold", key, 0, None)
    assert parts.index.match(key, 0) == {"untold": 1}


TEXT = " ".join(f"def number_{number}(a, b): return a + {number} * b" for number in range(200))


def long_text(end: str = "") -> Prompt:
    return Prompt((TEXT + end).encode(), False, b"", is_text=True, model="base")


@pytest.mark.parametrize("num_stored", [0, 100, 1000, 3000, 10**6])
async def test_a_text_is_tokenised_no_further_than_somebody_has_it_cached(parts: Parts, num_stored: int) -> None:
    pieces = Remembering()
    tokenizer = PromptTokenizer(card(), pieces)
    tokens = array("I", ids(tokenizer.tokens(long_text())))
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(tokens[:num_stored]))
    parts.index.use_tokenizer(PromptTokenizer(card(), pieces))
    pieces.texts.clear()
    key = await parts.index.key(long_text())
    num_cached = min(num_stored, len(tokens)) // SIZE * SIZE
    assert parts.index.match(key, 0) == ({"told": num_cached} if num_cached else {})
    num_more = len("".join(pieces.texts)) - len(TEXT) * min(num_stored / len(tokens), 1)
    assert num_more < 3 * CHUNK_CHARACTERS
    assert abs(key.num_tokens / len(tokens) - 1) < 0.05


async def test_a_text_that_was_just_sent_is_expected_there_though_nobody_has_it_yet(parts: Parts) -> None:
    parts.index.use_tokenizer(PromptTokenizer(card(), PieceCache(10**6)))
    for url in ("told", "other"):
        parts.precise.reset(url, is_complete=True)
    first, second = await parts.index.key(long_text(" x")), await parts.index.key(long_text(" y"))
    parts.index.insert("told", first, 0, None)
    assert parts.index.match(second, 1)["told"] > 0.95 * second.num_tokens
    assert parts.index.match(second, 10) == {}
    parts.index.insert("other", first, 10, None)
    parts.index.withdraw("other", first)
    assert parts.index.match(second, 10) == {}


async def test_a_failed_dispatch_is_withdrawn_from_both(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    key = await parts.index.key(token_prompt(64))
    for url in ("told", "untold"):
        parts.index.insert(url, key, 0, None)
        parts.index.withdraw(url, key)
    assert parts.index.match(key, 0) == {}


async def test_a_void_cache_is_to_be_learned_anew(parts: Parts) -> None:
    key = await parts.index.key(token_prompt(64))
    parts.index.insert("gone", key, 0, None)
    parts.index.withdraw("gone")
    assert (parts.index.match(key, 0), parts.withdrawn) == ({}, ["gone"])


async def test_blocks_are_counted_as_far_as_they_are_known(parts: Parts) -> None:
    parts.precise.reset("told", is_complete=True)
    parts.precise.apply("told", stored(array("I", [1] * 32)))
    parts.index.insert("untold", await parts.index.key(token_prompt(64)), 0, None)
    assert [parts.index.num_blocks(url) for url in ("told", "untold", "gone")] == [2, 4, 0]


async def test_long_prompts_are_done_in_a_thread_and_short_ones_at_once() -> None:
    threads = Threads()
    names = [await threads.run(size, threading.current_thread) for size in (INLINE_BYTES, INLINE_BYTES + 1)]
    threads.close()
    assert [thread is threading.main_thread() for thread in names if thread] == [True, False]


async def test_beyond_what_may_wait_a_prompt_is_not_done() -> None:
    threads, big, gate = Threads(max_long_prompts=1), INLINE_BYTES + 1, threading.Event()
    first = asyncio.create_task(threads.run(big, gate.wait))
    await asyncio.sleep(0)
    assert await threads.run(big, lambda: "done") is None
    gate.set()
    assert await first is True
    assert (await threads.run(big, lambda: "done"), threads.num_refused) == ("done", 1)
    threads.close()


async def test_a_beginning_has_the_name_of_its_last_block_by_tokens_or_else_by_bytes() -> None:
    guessed = BlockHashes(64, (7,))
    known = MixedKey(40, guessed, {16: (1, 2)})
    assert [known.beginning(num) for num in (16, 32)] == [1, 2]
    assert MixedKey(40, guessed, None).beginning(64) == known.beginning(64) == 7
