"""A Kubernetes API server over HTTP, as far as one client's requests need it: each is answered as a test says."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

Answer = Callable[[web.Request], Awaitable[web.Response]]


def refusal(status: int, message: str = "") -> web.Response:
    """As the API server words it."""
    return web.json_response({"kind": "Status", "message": message, "code": status}, status=status)


async def nothing(request: web.Request) -> web.Response:
    """Lists are empty, and no object is there."""
    is_list = request.method == "GET" and "labelSelector" in request.query
    return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []}) if is_list else refusal(404)


class HttpApi:
    """`answer` answers; `asked` are the requests: methods with the selector of a list or the name of an object."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.configuration = Configuration()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.method, request.query.get("labelSelector") or request.path.rpartition("/")[2]))
        return await self.answer(request)


@asynccontextmanager
async def http_api(answer: Answer = nothing) -> AsyncIterator[HttpApi]:
    api = HttpApi(answer)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(app) as server:
        api.configuration = Configuration(host=str(server.make_url("")))
        yield api


def answering(content: dict[str, Any]) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(content)

    return answer
