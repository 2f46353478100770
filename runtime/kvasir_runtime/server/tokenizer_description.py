"""GET /tokenizer: all that a router needs to make the very token ids of a prompt that this engine makes; and GET
/tokenizer_info, where a flag asks for it, for clients that tokenize by /tokenize.

The first is for the router alone (`trust`), and large: so with an ETag, which is the same wherever the same tokenizer
and the same chat template are served.
"""

import asyncio
import hashlib
from functools import cached_property
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.responses import TokenizerResponse, to_json

TOKENIZER_PATH = "/tokenizer"
TOKENIZER_INFO_PATH = "/tokenizer_info"
DEFAULT_CLASS = "PreTrainedTokenizerFast"


class TokenizerDescription:
    def __init__(self, tokenizer: Tokenizer, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @cached_property
    def response(self) -> TokenizerResponse:
        """Tens of milliseconds of work for a large vocabulary, once."""
        tokenizer = self._tokenizer
        text, special_tokens = tokenizer.to_json(), tokenizer.special_tokens
        parts = [text, self._chat_template, sorted(special_tokens.items())]
        return TokenizerResponse(
            tokenizer=text,
            chat_template=self._chat_template,
            special_tokens=special_tokens,
            digest=hashlib.sha256(msgspec.json.encode(parts)).hexdigest(),
        )

    def info(self) -> dict[str, Any]:
        """What tokenizer_config.json says, in vLLM's shape: tokens as texts."""
        settings = {name: _as_text(value) for name, value in self._tokenizer.settings.items()}
        return {"tokenizer_class": DEFAULT_CLASS, **settings, "chat_template": self._chat_template}


def _as_text(value: Any) -> Any:
    """A token is written as an object where it has properties."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def tokenizer_info_routes(description: TokenizerDescription) -> APIRouter:
    router = APIRouter()

    @router.get(TOKENIZER_INFO_PATH)
    async def tokenizer_info() -> Response:
        return Response(to_json(description.info()), media_type="application/json")

    return router


def tokenizer_routes(description: TokenizerDescription) -> APIRouter:
    router = APIRouter()

    @router.get(TOKENIZER_PATH)
    async def tokenizer(request: Request) -> Response:
        response = await asyncio.to_thread(lambda: description.response)
        headers = {"ETag": f'"{response.digest}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        body = await asyncio.to_thread(to_json, response)
        return Response(body, headers=headers, media_type="application/json")

    return router
