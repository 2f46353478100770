"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.prompts import INLINE_TOKENS, PromptBuilder
from kvasir_runtime.server.resolving import Limits
from kvasir_runtime.server.tokenize import tokenize_routes

LIMITS = Limits(max_model_len=10**6, vocab_size=320, max_n=1, max_num_seqs=1, max_sequences=1, max_logprobs=0)


def test_text_and_back(running) -> None:
    text = "the quick 日本語 😀"
    answer = running.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == running.tokenizer.encode(text).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert answer["token_strs"] == running.tokenizer.encode(text).tokens
    back = running.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_messages_are_tokenized_as_a_chat_would(running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    running.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    answer = running.http.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == running.core.received[0].spec.prompt_token_ids


def test_token_outside_the_vocabulary_is_refused(running) -> None:
    answer = running.http.post("/detokenize", json={"tokens": [5, 10**6]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/detokenize", {"tokens": [5] * 512}, None),
        ("/detokenize", {"tokens": [5] * 513}, "tokens"),
        ("/detokenize", {"tokens": [10**6] * 513}, "tokens"),
        ("/tokenize", {"prompt": "é" * 256, "return_token_strs": True}, None),
        ("/tokenize", {"prompt": "é" * 257, "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "é" * 257}, None),
    ],
)
def test_text_is_made_of_no_more_tokens_than_the_context_has(running, path: str, content: dict, param) -> None:
    answer = running.http.post(path, json=content)
    if param is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "no more than the 512 of the model's context" in error["message"]


@pytest.mark.parametrize("body", [b'{"messages":' + b"[" * 100_000, b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"])
def test_a_body_nested_too_deeply_is_refused(running, body: bytes) -> None:
    answer = running.http.post("/tokenize", content=body)
    assert (answer.status_code, "recursion limit" in answer.json()["error"]["message"]) == (400, True)


class WatchedTokenizer(Tokenizer):
    """Notes the threads that make text of tokens."""

    threads: set[threading.Thread]

    def decode(self, token_ids: list[int]) -> str:
        self.threads.add(threading.current_thread())
        return super().decode(token_ids)

    def token(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        return super().token(token_id)


@pytest.mark.parametrize(("num_tokens", "is_inline"), [(INLINE_TOKENS, True), (INLINE_TOKENS + 1, False)])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_text_is_made_of_many_tokens_beside_the_event_loop(model_folder, path: str, num_tokens: int, is_inline) -> None:
    tokenizer = WatchedTokenizer.load(model_folder)
    tokenizer.threads = set()
    serving = SimpleNamespace(
        tokenizer=tokenizer,
        prompts=PromptBuilder(tokenizer, None),
        limits=lambda: LIMITS,
        check_model=lambda _: "tiny",
        max_body_bytes=10**6,
        max_body_seconds=60.0,
    )
    bodies = {
        "/tokenize": {"prompt": "#" * num_tokens, "return_token_strs": True},
        "/detokenize": {"tokens": [5] * num_tokens},
    }
    answer = post(serving, path, bodies[path])
    assert answer.status_code == 200
    assert [thread is threading.main_thread() for thread in tokenizer.threads] == [is_inline]


def post(serving: Any, path: str, content: dict[str, Any]) -> httpx.Response:
    app = FastAPI()
    app.include_router(tokenize_routes(cast(Any, serving)))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
            return await client.post(path, json=content)

    return asyncio.run(ask())
