"""The OpenAI surface as a FastAPI application: what is named here is forwarded, models are listed, errors take OpenAI's
shape. An engine's other paths, those that load adapters or change its state, are not reachable from outside.
"""

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir_router.api_keys import ApiKeys
from kvasir_router.app import Handler
from kvasir_router.errors import MethodNotAllowedError, RequestError, UnknownPathError
from kvasir_router.models import ModelCatalog

_HOT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
FORWARDED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    # Of engines of other makes:
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
)
"""POST with a JSON object that names a model; each is answered by one engine."""


def create_app(handler: Handler, models: ModelCatalog, api_keys: ApiKeys | None) -> ASGIApp:
    """The two paths that carry the load go straight to the handler; FastAPI serves and refuses everything else.

    A slash at the end of a path means nothing, and no engine sees it: some would answer with a redirect to themselves.
    """
    app = _create_fastapi(handler, models, api_keys)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        is_hot = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _HOT_PATHS
        await (handler if is_hot else app)(scope, receive, send)

    return serve


def _create_fastapi(handler: Handler, models: ModelCatalog, api_keys: ApiKeys | None) -> FastAPI:
    app = FastAPI(title="Kvasir router", openapi_url=None, redirect_slashes=False)
    listing = _ModelRoutes(models, api_keys)
    app.router.routes.extend(
        [
            Route("/v1/models", listing.list, methods=["GET"]),
            Route("/v1/models/{name:path}", listing.show, methods=["GET"]),
            *(Route(path, handler, methods=["POST"]) for path in FORWARDED_PATHS),
        ]
    )
    app.add_exception_handler(RequestError, _answer_error)
    app.add_exception_handler(404, _answer_unknown_path)
    app.add_exception_handler(405, _answer_wrong_method)
    return app


class _ModelRoutes:
    def __init__(self, models: ModelCatalog, api_keys: ApiKeys | None) -> None:
        self._models = models
        self._api_keys = api_keys

    async def list(self, request: Request) -> Response:
        self._authenticate(request)
        return JSONResponse(self._models.listing())

    async def show(self, request: Request) -> Response:
        self._authenticate(request)
        name = request.path_params["name"]
        self._models.check(name)
        return JSONResponse(self._models.card(name))

    def _authenticate(self, request: Request) -> None:
        if self._api_keys is not None:
            self._api_keys.tenant_of(request.scope["headers"])


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return Response(error.body(), error.status, media_type="application/json")


async def _answer_unknown_path(request: Request, error: Exception) -> Response:
    message = f"there is no {request.url.path}; see /v1/models and /v1/chat/completions"
    return await _answer_error(request, UnknownPathError(message))


async def _answer_wrong_method(request: Request, error: Exception) -> Response:
    return await _answer_error(request, MethodNotAllowedError(f"{request.url.path} does not take {request.method}"))
