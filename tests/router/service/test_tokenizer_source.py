"""Which engines are asked for their tokenizer, and how often."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import aiohttp
import pytest
from msgspec.structs import asdict, replace
from tests.router.prefix_index.test_tokens import card

from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.tokens import PromptTokenizer, TokenizerCard
from kvasir_router.service.tokenizer_source import Tokenizers, TokenizerSource

pytestmark = pytest.mark.anyio


@pytest.fixture
def told() -> list[PromptTokenizer | None]:
    return []


@pytest.fixture
async def source(client: aiohttp.ClientSession, told: list[PromptTokenizer | None]) -> AsyncIterator[TokenizerSource]:
    made = TokenizerSource(client, "secret", Tokenizers(), told.append, None, retry_seconds=0.02)
    yield made
    await made.close()


def asked(engine: Any) -> int:
    return int(engine.num_tokenizer_requests)


def addresses(*engines: Any, revision: str = "") -> frozenset[Address]:
    return frozenset(Address(engine.url, revision=revision) for engine in engines)


async def test_one_engine_of_a_revision_is_asked(
    engines: list[Any], source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    for engine in engines:
        engine.tokenizer_card = asdict(card())
    source.follow(addresses(*engines))
    await until(lambda: told)
    source.follow(addresses(engines[0]))
    source.follow(addresses(*engines))
    await until(lambda: source.is_done)
    assert (len(told), sum(map(asked, engines))) == (1, 1)


async def test_another_revision_is_asked_and_the_same_tokenizer_is_not_told_again(
    engines: list[Any], source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    one, two = engines
    one.tokenizer_card = two.tokenizer_card = asdict(card())
    source.follow(addresses(one, revision="old"))
    await until(lambda: told)
    source.follow(addresses(one, revision="old") | addresses(two, revision="new"))
    await until(lambda: asked(two) == 1 and source.is_done)
    assert len(told) == 1
    one.tokenizer_card = asdict(replace(card(), digest="another"))
    source.follow(addresses(one, revision="newest"))
    await until(lambda: [tokenizer.digest for tokenizer in told] == ["digest", "another"])


@pytest.mark.parametrize("answer", [None, {"tokenizer": "{}", "digest": "d"}, {"digest": "d"}])
async def test_an_engine_without_a_usable_tokenizer_is_asked_once_and_then_another(
    engines: list[Any],
    source: TokenizerSource,
    told: list[PromptTokenizer | None],
    until: Callable[..., Any],
    answer: Any,
) -> None:
    without, having = engines
    without.tokenizer_card, having.tokenizer_card = answer, asdict(card())
    source.follow(addresses(without))
    await until(lambda: asked(without) == 1 and source.is_done)
    source.follow(addresses(*engines))
    await until(lambda: told)
    assert asked(without) == 1


async def test_an_engine_that_is_not_up_yet_is_asked_again(
    engine: Any, source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    engine.tokenizer_card = asdict(card())
    await engine.stop()
    source.follow(addresses(engine))

    await engine.start()
    await until(lambda: told)


@pytest.mark.parametrize("status", [408, 429, 500])
async def test_an_engine_that_is_busy_is_asked_again(
    status: int, engine: Any, source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    engine.tokenizer_status = status
    source.follow(addresses(engine))
    await until(lambda: asked(engine) > 0)
    engine.tokenizer_card = asdict(card())
    await until(lambda: told)


async def test_an_engine_is_told_who_asks(
    engine: Any, source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    engine.tokenizer_card = asdict(card())
    source.follow(addresses(engine))
    await until(lambda: told)
    assert engine.headers[0]["x-kvasir-router-secret"] == "secret"


async def test_what_nobody_wants_any_more_when_it_is_loaded_is_dropped_at_once(
    engine: Any, client: aiohttp.ClientSession, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    engine.tokenizer_card = asdict(card())
    gate, tokenizers = asyncio.Event(), Tokenizers()

    class Slow:
        async def of(self, its_card: TokenizerCard) -> PromptTokenizer:
            await gate.wait()
            return await tokenizers.of(its_card)

    source = TokenizerSource(client, None, cast(Tokenizers, Slow()), told.append, 0.2)
    source.follow(addresses(engine))
    source.want()
    await until(lambda: told == [None])
    gate.set()
    await until(lambda: source.is_done and len(tokenizers) == 0)
    assert told == [None]
    await source.close()


async def test_an_address_that_comes_back_may_be_another_engines(
    engine: Any, source: TokenizerSource, told: list[PromptTokenizer | None], until: Callable[..., Any]
) -> None:
    source.follow(addresses(engine))
    await until(lambda: asked(engine) == 1 and source.is_done)
    source.follow(frozenset())
    engine.tokenizer_card = asdict(card())
    source.follow(addresses(engine))
    await until(lambda: told)
