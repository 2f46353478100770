"""What is asked of responses by their ids (/v1/responses/ID): each is kept by one engine, whose mark stands in the id.

These answers are short and rare, and are passed on whole, outside of admission and of all counts.
"""

import logging
from collections.abc import Iterator

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvasir_router.api_keys import ApiKeys
from kvasir_router.dialects.responses import mark_in
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
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
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
            async with self._session.request(request.method, url, headers=headers, timeout=_TIMEOUT) as answer:
                return Response(await answer.read(), answer.status, {"content-type": answer.content_type})
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise BadGatewayError(f"the engine {endpoint.url}, which keeps this response, does not answer") from error

    def _holder(self, response_id: str) -> tuple[Service, Endpoint]:
        mark = mark_in(response_id.encode())
        for service in self._services:
            if mark is not None and (endpoint := service.holder(mark)) is not None:
                return service, endpoint
        raise ResponseNotFoundError(
            f"response {response_id[:200]!r} is not kept here: the engine that made it is gone, or it was never made"
        )


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
