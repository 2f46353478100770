"""What the router, or whoever runs the engine, has it do between requests: POST /abort_requests, /reset_prefix_cache,
/sleep and /wake_up, and GET /is_sleeping, under vLLM's names. `middleware` asks for the router's secret."""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.errors import InvalidRequestError, ServerUnavailableError
from kvasir_runtime.server.body import read_names
from kvasir_runtime.server.errors import CannotSleepError
from kvasir_runtime.server.probes import Probes
from kvasir_runtime.server.responses import SleepState, to_json

ABORT_PATH, RESET_PREFIX_PATH = "/abort_requests", "/reset_prefix_cache"
SLEEP_PATH, WAKE_UP_PATH, IS_SLEEPING_PATH = "/sleep", "/wake_up", "/is_sleeping"
CONTROL_PATHS = frozenset({ABORT_PATH, RESET_PREFIX_PATH, SLEEP_PATH, WAKE_UP_PATH, IS_SLEEPING_PATH})
MAX_NAMED = 4096
_MAX_BYTES = 2**20
_LEVELS = {"1": 1, "2": 2}


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_NAMED)]
    """Of answers (`id`), or the `x-request-id` that requests came with."""


def control_routes(probes: Probes) -> APIRouter:
    router = APIRouter()

    @router.post(ABORT_PATH)
    async def abort_requests(request: Request) -> Response:
        form = '{"request_ids": ["...", ...]}'
        named = await read_names(request, _Named, form, _MAX_BYTES, probes.max_body_seconds)
        probes.check_health()
        probes.engine.end_requests(named.request_ids)
        return Response()

    @router.post(RESET_PREFIX_PATH)
    async def reset_prefix_cache() -> Response:
        probes.check_health()
        probes.engine.reset_prefix_cache()
        return Response()

    @router.post(SLEEP_PATH)
    async def sleep(request: Request) -> Response:
        """Returns when the engine sleeps, and its memory is being given back."""
        level = _asked_level(request)
        probes.check_health()
        if probes.engine.ready is None:
            raise ServerUnavailableError("the model is still loading; wait until /ready answers 200")
        if (refusal := probes.sleep_refusals.get(level)) is not None:
            raise CannotSleepError(refusal)
        if probes.engine.sleep_level not in (None, level):
            raise CannotSleepError(f"this engine sleeps at level {probes.engine.sleep_level} already; wake it up first")
        await probes.engine.sleep(level)
        return Response()

    @router.post(WAKE_UP_PATH)
    async def wake_up(request: Request) -> Response:
        """Returns when the engine is ready again."""
        if "tags" in request.query_params:
            raise InvalidRequestError("tags: an engine wakes up as a whole; leave it out", "tags")
        probes.check_health()
        await probes.engine.wake_up()
        return Response()

    @router.get(IS_SLEEPING_PATH)
    async def is_sleeping() -> Response:
        probes.check_health()
        level = probes.engine.sleep_level
        return Response(to_json(SleepState(level is not None, level)), media_type="application/json")

    return router


def sleep_refusals(config: RuntimeConfig) -> dict[int, str]:
    """Why this engine cannot sleep, by level."""
    if config.cache.kv_transfer_config is not None:
        reason = "this engine exchanges KV with others, which know where its cache lies (--kv-transfer-config)"
        return dict.fromkeys(_LEVELS.values(), f"{reason}: it cannot sleep; end it instead")
    if config.parallel.nnodes > 1:
        return {2: "this engine's ranks on other nodes cannot be started again from here: it sleeps at level 1 only"}
    return {}


def _asked_level(request: Request) -> int:
    """Raises InvalidRequestError."""
    mode, text = request.query_params.get("mode", "abort"), request.query_params.get("level", "1")
    if mode != "abort":
        raise InvalidRequestError(
            f"mode: {mode[:40]!r} was given, but what is under way is aborted; leave it out", "mode"
        )
    if text not in _LEVELS:
        raise InvalidRequestError(
            f"level: {text[:40]!r} was given; 1 gives the KV cache's memory back, 2 the weights' as well", "level"
        )
    return _LEVELS[text]
