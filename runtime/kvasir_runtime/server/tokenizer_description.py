"""GET /tokenizer: all that a router needs to make the very token ids of a prompt that this engine makes.

For the router alone (`trust`), and large: so with an ETag, which is the same wherever the same tokenizer and the
same chat template are served.
"""

import asyncio
import hashlib
from functools import cached_property

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.responses import TokenizerResponse, to_json

TOKENIZER_PATH = "/tokenizer"


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
