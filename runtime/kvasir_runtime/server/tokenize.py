"""POST /tokenize and /detokenize, in vLLM's shapes.

A text may have more tokens than the model's context, so that a client learns how many; text is made of no more of them.
"""

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from kvasir_runtime.errors import ContextLengthError
from kvasir_runtime.server.body import parse, read_body
from kvasir_runtime.server.prompts import of_tokens
from kvasir_runtime.server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from kvasir_runtime.server.resolving import check_token_ids
from kvasir_runtime.server.responses import DetokenizeResponse, TokenizeResponse, to_json
from kvasir_runtime.server.serving import Serving


def tokenize_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, serving.max_body_bytes, serving.max_body_seconds)
        limits = serving.limits()
        kind: type[TokenizeChatRequest | TokenizeTextRequest]
        kind = TokenizeChatRequest if _has_messages(body) else TokenizeTextRequest
        wishes = parse(kind, body)
        serving.check_model(wishes.model)
        if isinstance(wishes, TokenizeChatRequest):
            tokens = (await serving.prompts.chat_prompt(wishes, limits)).token_ids
        else:
            tokens = await serving.prompts.encode(
                wishes.prompt, wishes.add_special_tokens, limits.max_model_len, "prompt"
            )
        strings = None
        if wishes.return_token_strs:
            _check_number(tokens, limits.max_model_len, "return_token_strs")
            strings = await of_tokens(lambda tokens: list(map(serving.tokenizer.token, tokens)), tokens)
        return _json(TokenizeResponse(len(tokens), limits.max_model_len, tokens, strings))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        wishes = parse(DetokenizeRequest, await read_body(request, serving.max_body_bytes, serving.max_body_seconds))
        limits = serving.limits()
        serving.check_model(wishes.model)
        _check_number(wishes.tokens, limits.max_model_len, "tokens")
        check_token_ids(wishes.tokens, limits.vocab_size, "tokens")
        return _json(DetokenizeResponse(await of_tokens(serving.tokenizer.decode, wishes.tokens)))

    return router


def _check_number(tokens: Sequence[int], max_model_len: int, param: str) -> None:
    if len(tokens) > max_model_len:
        raise ContextLengthError(
            f"{param}: there are {len(tokens)} tokens, but text is made of no more than the {max_model_len} of the "
            "model's context at once; send several requests",
            param,
        )


def _has_messages(body: bytes) -> bool:
    """Which of the two kinds this is; a body that is no JSON object is refused by either."""
    try:
        return "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _json(value: TokenizeResponse | DetokenizeResponse) -> Response:
    return Response(to_json(value), media_type="application/json")
