"""The HTTP application of one API process: its routes, its guards, and one place where errors become answers."""

from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import kvasir_runtime
from kvasir_runtime.errors import KvasirRuntimeError
from kvasir_runtime.server.admission import Admission, BodyBudget
from kvasir_runtime.server.chat import CHAT
from kvasir_runtime.server.completions import COMPLETIONS
from kvasir_runtime.server.control import control_routes
from kvasir_runtime.server.embeddings import CLASSIFY, EMBEDDINGS, POOLING
from kvasir_runtime.server.errors import handle_defect, handle_disconnect, handle_http_error, handle_runtime_error
from kvasir_runtime.server.messages import MESSAGES, count_tokens_routes
from kvasir_runtime.server.middleware import (
    AdmissionMiddleware,
    ApiKeyMiddleware,
    BodyBudgetMiddleware,
    RouterTrustMiddleware,
)
from kvasir_runtime.server.open_responses import RESPONSES, kept_responses_routes
from kvasir_runtime.server.pooling import PoolingRoute, pooling_routes
from kvasir_runtime.server.probes import Probes, probe_routes
from kvasir_runtime.server.responses import ModelCard, ModelList, to_json
from kvasir_runtime.server.scoring import RERANK, SCORE
from kvasir_runtime.server.serving import Route, Serving, generating_routes
from kvasir_runtime.server.tokenize import tokenize_routes
from kvasir_runtime.server.tokenizer_description import tokenizer_info_routes, tokenizer_routes

GENERATING: tuple[Route[Any, Any], ...] = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
MAKING_VECTORS: tuple[PoolingRoute[Any], ...] = (EMBEDDINGS, POOLING, CLASSIFY, SCORE, RERANK)
WORKING_PATHS = frozenset(
    [route.path for route in GENERATING] + [path for route in MAKING_VECTORS for path in route.paths]
)
"""Where the engine has to do with the answer."""


def create_app(
    serving: Serving,
    probes: Probes,
    admission: Admission,
    bodies: BodyBudget,
    *,
    api_key: str | None,
    router_secret: str | None,
    kv_transfer_trust_clients: bool,
    shows_tokenizer_info: bool = False,
) -> FastAPI:
    app = FastAPI(title="Kvasir", version=kvasir_runtime.__version__, docs_url=None, redoc_url=None)
    app.include_router(generating_routes(serving, GENERATING))
    app.include_router(pooling_routes(serving, MAKING_VECTORS))
    app.include_router(model_routes(serving))
    app.include_router(tokenize_routes(serving))
    app.include_router(count_tokens_routes(serving))
    app.include_router(kept_responses_routes(serving))
    app.include_router(tokenizer_routes(serving.description))
    if shows_tokenizer_info:
        app.include_router(tokenizer_info_routes(serving.description))
    app.include_router(probe_routes(probes))
    app.include_router(control_routes(probes))
    app.add_exception_handler(KvasirRuntimeError, handle_runtime_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_defect)
    app.add_middleware(BodyBudgetMiddleware, budget=bodies)
    app.add_middleware(AdmissionMiddleware, admission=admission, paths=WORKING_PATHS)
    app.add_middleware(RouterTrustMiddleware, secret=router_secret, kv_transfer_trust_clients=kv_transfer_trust_clients)
    if api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=api_key)  # added last, so it comes first
    return app


def model_routes(serving: Serving) -> APIRouter:
    """The names under which this server's model is known."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList([_card(serving, name) for name in serving.model_names]))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return _json(_card(serving, serving.check_model(name)))

    return router


def _card(serving: Serving, name: str) -> ModelCard:
    """The context length is known once the engine is ready."""
    ready = serving.engine.ready
    max_model_len = None if ready is None else ready.max_model_len
    return ModelCard(id=name, created=serving.created, root=serving.model_folder, max_model_len=max_model_len)


def _json(value: ModelCard | ModelList) -> Response:
    return Response(to_json(value), media_type="application/json")
