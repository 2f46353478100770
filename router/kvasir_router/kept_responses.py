"""What is asked of responses by their ids (/v1/responses/ID): each is kept by one engine, whose mark stands in the id.

These answers are rare, and are passed on outside of admission and of all counts: whole, or as the events of one that is
made in the background come.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import aiohttp
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvasir_router.api_keys import ApiKeys
from kvasir_router.dialects.responses import Responses, mark_in
from kvasir_router.errors import BadGatewayError, ResponseNotFoundError
from kvasir_router.relay.exchange import request_id_of
from kvasir_router.relay.proxy import ROUTER_SECRET_HEADER, TENANT_HEADER
from kvasir_router.service.registry import Endpoint
from kvasir_router.service.service import Service, Services

logger = logging.getLogger(__name__)
PATHS = {
    "/v1/responses/{response_id}/cancel": ("POST",),
    "/v1/responses/{response_id}/input_items": ("GET",),
    "/v1/responses/{response_id}": ("GET", "DELETE"),
}
_SECONDS = 10.0
"""For an answer, of which events come in their own time."""
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
_EVENT_STREAM = "text/event-stream"
_PASSED = ("authorization", "x-api-key")


class KeptResponses:
    def __init__(self, services: Services, api_keys: ApiKeys | None, session: aiohttp.ClientSession) -> None:
        self._services = services
        self._api_keys = api_keys
        self._session = session

    def routes(self) -> Iterator[Route]:
        """Whatever stands in an id's place is one, and not known."""
        for path, methods in PATHS.items():
            yield Route(path.replace("response_id", "response_id:path"), self._ask, methods=[*methods])

    async def _ask(self, request: Request) -> Response:
        """Raises RequestError."""
        tenant = None if self._api_keys is None else self._api_keys.tenant_of(request.scope["headers"])
        service, endpoint = self._holder(request.path_params["response_id"])
        url = f"{endpoint.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = _headers(request, tenant, service.router_secret)
        try:
            async with asyncio.timeout(_SECONDS):
                answer = await self._session.request(request.method, url, headers=headers, timeout=_NO_TIMEOUT)
                if answer.content_type == _EVENT_STREAM:
                    return StreamingResponse(_events(answer), answer.status, media_type=_EVENT_STREAM)
                async with answer:
                    return Response(await answer.read(), answer.status, {"content-type": answer.content_type})
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _does_not_answer(endpoint.url) from error

    def _holder(self, response_id: str) -> tuple[Service, Endpoint]:
        mark = mark_in(response_id.encode())
        for service in self._services:
            if mark is not None and (endpoint := service.holder(mark)) is not None:
                return service, endpoint
        raise ResponseNotFoundError(
            f"response {response_id[:200]!r} is not kept here: the engine that made it is gone, or it was never made"
        )


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The last is an error's where the engine breaks off."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError):
        logger.info("%s broke off the events of a response", answer.url)
        yield Responses().error_event(_does_not_answer(str(answer.url.origin())))
    finally:
        answer.close()


def _does_not_answer(url: str) -> BadGatewayError:
    return BadGatewayError(f"the engine {url}, which keeps this response, does not answer")


def _headers(request: Request, tenant: str | None, router_secret: str | None) -> dict[str, str]:
    """Where the router checked a key, it names the key's tenant to the engine instead of passing the key on."""
    headers = {"x-request-id": request_id_of(request.scope["headers"])}
    if tenant is not None:
        headers[TENANT_HEADER] = tenant
    else:
        headers |= {name: value for name in _PASSED if (value := request.headers.get(name)) is not None}
    if router_secret is not None:
        headers[ROUTER_SECRET_HEADER] = router_secret
    return headers
