"""GET /v1/models and /v1/models/{name}: the names under which this server's model is known."""

from fastapi import APIRouter
from starlette.responses import Response

from kvasir_runtime.server.responses import ModelCard, ModelList, to_json
from kvasir_runtime.server.serving import Serving


def model_routes(serving: Serving) -> APIRouter:
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
