"""A write is asked about a last time when there is a connection for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from kvasir_operator.errors import LeadershipLostError
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.kinds import SERVICE

SERVICE_OBJECT = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "models"}}


class Lead:
    """May be lost after `num_asked` questions; None is never."""

    def __init__(self, num_asked: int | None) -> None:
        self.num_left = num_asked

    def check(self) -> None:
        if self.num_left == 0:
            raise LeadershipLostError("another leads")
        if self.num_left is not None:
            self.num_left -= 1


@asynccontextmanager
async def api_server() -> AsyncIterator[tuple[str, list[str]]]:
    """Its address, and the methods that it was asked with."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.json_response(SERVICE_OBJECT)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")), asked


def methods(lead: Lead, *, is_connected: bool = False) -> list[str]:
    """What reaches the API server of a get, where there is to be a connection already, and a write."""
    found: list[str] = []

    async def body() -> None:
        async with api_server() as (url, asked):
            kube = KubeClient(Configuration(host=url), ClientHooks(before_write=lead.check))
            try:
                if is_connected:
                    await kube.get(SERVICE, "models", "a")
                await kube.create(SERVICE_OBJECT)
            except LeadershipLostError:
                found.append("refused")
            finally:
                await kube.close()
                found.extend(asked)

    asyncio.run(body())
    return found


def test_a_leader_reads_and_writes() -> None:
    assert methods(Lead(None), is_connected=True) == ["GET", "POST"]


@pytest.mark.parametrize("is_connected", [False, True], ids=["new connection", "open connection"])
def test_who_lost_the_lead_while_a_write_waited_for_a_connection_sends_nothing(is_connected: bool) -> None:
    expected: list[Any] = ["refused", "GET"] if is_connected else ["refused"]
    assert methods(Lead(1), is_connected=is_connected) == expected


def test_who_does_not_lead_may_read() -> None:
    assert methods(Lead(0), is_connected=True) == ["refused", "GET"]
