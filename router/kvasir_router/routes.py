"""The APIs as a Starlette application: what is named here is forwarded, models are listed, errors take the shape of
the API that was asked. An engine's other paths, those that load adapters or change its state, are not reachable from
outside.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_router import __version__
from kvasir_router.api_keys import ApiKeys
from kvasir_router.dialects.chat import Chat
from kvasir_router.dialects.dialect import Dialect
from kvasir_router.dialects.messages import CountTokens, Messages
from kvasir_router.dialects.openai import OpenAIErrors
from kvasir_router.dialects.responses import Responses
from kvasir_router.dialects.text_prompts import Completions, Embeddings, Scores, Tokenize
from kvasir_router.errors import MethodNotAllowedError, RequestError, UnknownPathError
from kvasir_router.kept_responses import PATHS, KeptResponses
from kvasir_router.ollama_models import METHODS as OLLAMA_METHODS
from kvasir_router.ollama_models import PREFIX as OLLAMA_PREFIX
from kvasir_router.ollama_models import SHOW_PATH, OllamaErrors, ollama_routes
from kvasir_router.relay.exchange import request_id_of
from kvasir_router.relay.headers import EXPOSED_HEADERS
from kvasir_router.relay.ollama import PATHS as OLLAMA_PATHS
from kvasir_router.service.service import Services

logger = logging.getLogger(__name__)
_CLASSES = ("/pooling", "/classify", "/v1/classify")
_SCORES = ("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/embeddings": Embeddings(),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/responses": Responses(),
    "/tokenize": Tokenize(),
    "/detokenize": Tokenize(),
    **{path: Embeddings(path) for path in _CLASSES},
    **{path: Scores(path) for path in _SCORES},
}
"""What is forwarded, by path: POST with a JSON object that names a model; each is answered by one engine."""
HEALTH_PATHS = ("/health", "/ping")
_FORWARDED = (*DIALECTS, *OLLAMA_PATHS)
_UNKNOWN_API = OpenAIErrors()
_OLLAMA_API = OllamaErrors()


def create_app(
    services: Services,
    api_keys: ApiKeys | None,
    kept_responses: KeptResponses,
    is_stopping: Callable[[], bool],
    cors_origins: Sequence[str] = (),
) -> ASGIApp:
    """What is answered here: all that is not forwarded. A slash at the end of a path means nothing."""
    app: ASGIApp = _application(services, api_keys, kept_responses, is_stopping)
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await app(scope, receive, send)

    return serve


def _application(
    services: Services, api_keys: ApiKeys | None, kept_responses: KeptResponses, is_stopping: Callable[[], bool]
) -> Starlette:
    listing = _ModelRoutes(services, api_keys)

    async def health(request: Request) -> Response:
        """For load balancers, which have no key: a router that stops is to get no more."""
        status, text = (503, "stopping") if is_stopping() else (200, "ok")
        return JSONResponse({"status": text}, status)

    routes = [
        Route("/openapi.json", _show_document),
        *(Route(path, health) for path in HEALTH_PATHS),
        Route("/v1/models", listing.list),
        Route("/v1/models/{name:path}", listing.show),
        *kept_responses.routes(),
        *ollama_routes(services, listing.authenticate),
    ]
    on_error = {RequestError: _answer_error, 404: _answer_unknown_path, 405: _answer_wrong_method}
    app = Starlette(routes=routes, exception_handlers=on_error)
    app.router.redirect_slashes = False
    return app


def document() -> dict[str, Any]:
    """OpenAPI's, of which paths there are and what each takes. What becomes of a body is engines' to say."""
    own = ("/openapi.json", *HEALTH_PATHS, "/v1/models", "/v1/models/{name}")
    methods = {**dict.fromkeys(own, ("GET",)), **PATHS, **OLLAMA_METHODS, **dict.fromkeys(_FORWARDED, ("POST",))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir router", "version": __version__},
        "paths": {path: {each.lower(): _operation(path) for each in taken} for path, taken in methods.items()},
    }


def _operation(path: str) -> dict[str, Any]:
    text, names = {"type": "string"}, re.findall("{(.+?)}", path)
    body = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    return {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": text} for name in names],
        "responses": {"200": {"description": "The answer."}, "default": {"description": "A refusal: the API's error."}},
        **({"requestBody": body} if path in _FORWARDED or path == SHOW_PATH else {}),
    }


def _wording_of(path: str) -> Dialect | OpenAIErrors | OllamaErrors:
    return _OLLAMA_API if path.startswith(OLLAMA_PREFIX) else DIALECTS.get(path, _UNKNOWN_API)


async def _show_document(request: Request) -> Response:
    return JSONResponse(document())


class _ModelRoutes:
    def __init__(self, services: Services, api_keys: ApiKeys | None) -> None:
        self._services = services
        self._api_keys = api_keys

    async def list(self, request: Request) -> Response:
        self.authenticate(request)
        return JSONResponse({"object": "list", "data": self._services.cards()})

    async def show(self, request: Request) -> Response:
        self.authenticate(request)
        return JSONResponse(self._services.card(request.path_params["name"]))

    def authenticate(self, request: Request) -> None:
        if self._api_keys is not None:
            self._api_keys.tenant_of(request.scope["headers"])


async def _answer_error(request: Request, error: Exception) -> Response:
    """In the words of the API that has the path, logged with the id that the client is told."""
    assert isinstance(error, RequestError)
    request_id = request_id_of(request.scope["headers"])
    logger.info("%s", error, extra={"request_id": request_id, "status": error.status})
    wording = _wording_of(request.scope["path"])
    response = Response(wording.error_body(error), error.status)
    response.raw_headers.extend([*error.headers(), (b"x-request-id", request_id.encode("latin-1"))])
    return response


async def _answer_unknown_path(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if path in _FORWARDED:
        return await _answer_error(request, _wrong_method(request, "POST"))
    error = UnknownPathError(f"there is no {path}; see /v1/models and /v1/chat/completions")
    return await _answer_error(request, error)


async def _answer_wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    assert error.headers is not None
    allowed = sorted(error.headers["Allow"].split(", "))
    return await _answer_error(request, _wrong_method(request, ", ".join(allowed)))


def _wrong_method(request: Request, allowed: str) -> MethodNotAllowedError:
    return MethodNotAllowedError(f"{request.url.path} does not take {request.method}, but {allowed}", allowed)
