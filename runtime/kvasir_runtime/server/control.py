"""What the router, or whoever runs the engine, has it do between requests: POST /abort_requests and POST
/reset_prefix_cache, under vLLM's names. `middleware` asks for the router's secret."""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.body import read_body
from kvasir_runtime.server.probes import Probes

ABORT_PATH, RESET_PREFIX_PATH = "/abort_requests", "/reset_prefix_cache"
CONTROL_PATHS = frozenset({ABORT_PATH, RESET_PREFIX_PATH})
MAX_NAMED = 4096
_MAX_BYTES = 2**20


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_NAMED)]
    """Of answers (`id`), or the `x-request-id` that requests came with."""


def control_routes(probes: Probes) -> APIRouter:
    router = APIRouter()

    @router.post(ABORT_PATH)
    async def abort_requests(request: Request) -> Response:
        try:
            body = await read_body(request, _MAX_BYTES, probes.max_body_seconds)
            named = msgspec.json.decode(body, type=_Named)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f'the body must be {{"request_ids": ["...", ...]}}: {error}') from error
        probes.check_health()
        probes.engine.end_requests(named.request_ids)
        return Response()

    @router.post(RESET_PREFIX_PATH)
    async def reset_prefix_cache() -> Response:
        probes.check_health()
        probes.engine.reset_prefix_cache()
        return Response()

    return router
