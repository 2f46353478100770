"""The OpenAI client library works through the router."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.anyio
MESSAGES: Any = [{"role": "user", "content": "count"}]


@pytest.fixture
async def openai_client(engine: Any, start_router: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    router = await start_router(engine)
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat_stream(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "0 1 2 3 4 "


async def test_chat(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "0 1 2 3 4"


async def test_models(openai_client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in openai_client.models.list()] == ["tiny"]


async def test_a_broken_stream_raises_after_its_tokens(engine: Any, openai_client: openai.AsyncOpenAI) -> None:
    engine.die_after_tokens, engine.token_seconds = 3, 0.01
    stream = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    tokens = [(await anext(stream)).choices[0].delta.content for _ in range(3)]
    assert tokens == ["0 ", "1 ", "2 "]
    with pytest.raises(openai.APIError, match="stopped in the middle"):
        await anext(stream)


async def test_an_unknown_model_raises_not_found(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="served are: tiny"):
        await openai_client.chat.completions.create(model="nope", messages=MESSAGES)
