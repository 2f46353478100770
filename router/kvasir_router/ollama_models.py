"""What Ollama's API says of models: /api/tags, /api/show and /api/version.

Requests for answers are chat's, see `relay.ollama`.
"""

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvasir_chat.ollama import LATEST
from kvasir_router.errors import BodyTooLargeError, MalformedRequestError, RequestError
from kvasir_router.service.service import Services

PREFIX = "/api/"
SHOW_PATH = "/api/show"
METHODS = {"/api/tags": ("GET",), SHOW_PATH: ("POST",), "/api/version": ("GET",)}
_VERSION = "0.40.0"
"""Of the Ollama whose API this is: clients ask for a newest one that they know."""
_MAX_BYTES = 64 * 2**10
_CAPABILITIES = ("completion", "tools", "thinking")
"""What can be asked for; what a model makes of it is its own."""


class OllamaErrors:
    def error_body(self, error: RequestError) -> bytes:
        return msgspec.json.encode({"error": str(error)})


def ollama_routes(services: Services, authenticate: Callable[[Request], None]) -> Iterator[Route]:
    """`authenticate` raises InvalidApiKeyError."""

    async def tags(request: Request) -> Response:
        authenticate(request)
        return JSONResponse({"models": [_tag(card) for card in services.cards()]})

    async def show(request: Request) -> Response:
        authenticate(request)
        card = services.card((await _named(request)).removesuffix(LATEST))
        length = {"kvasir.context_length": card["max_model_len"]} if "max_model_len" in card else {}
        tag = _tag(card)
        shown = {name: tag[name] for name in ("modified_at", "details")} | {"capabilities": _CAPABILITIES}
        told = {"modelfile": "", "parameters": "", "template": ""}
        return JSONResponse(told | shown | {"model_info": {"general.architecture": "kvasir", **length}})

    async def version(request: Request) -> Response:
        authenticate(request)
        return JSONResponse({"version": _VERSION})

    for (path, methods), endpoint in zip(METHODS.items(), (tags, show, version), strict=True):
        yield Route(path, endpoint, methods=[*methods])


def _tag(card: dict[str, Any]) -> dict[str, Any]:
    """Sizes and formats are engines'; the digest tells models apart."""
    name = card["id"]
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "size": 0,
        "digest": hashlib.sha256(str(card["root"]).encode()).hexdigest(),
        "details": {
            **dict.fromkeys(("parent_model", "format", "parameter_size", "quantization_level"), ""),
            "family": "kvasir",
            "families": ["kvasir"],
        },
    }


async def _named(request: Request) -> str:
    """Raises MalformedRequestError (400) and BodyTooLargeError (413)."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BYTES:
            raise BodyTooLargeError(f"the request body is larger than {_MAX_BYTES} bytes; a model's name is expected")
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MalformedRequestError(f"the request body is not a JSON object: {error}") from error
    name = asked.get("model") or asked.get("name")
    if not isinstance(name, str):
        raise MalformedRequestError("model: a name is expected; see /api/tags", param="model")
    return name
