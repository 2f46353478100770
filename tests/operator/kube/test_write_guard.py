"""A write is asked about a last time when there is a connection for it."""

import asyncio
from typing import Any

import pytest

from kvasir_operator.errors import LeadershipLostError
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.kinds import SERVICE

from .http_api import answering, http_api

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


def methods(lead: Lead, *, is_connected: bool = False) -> list[str]:
    """What reaches the API server of a get, where there is to be a connection already, and a write."""
    found: list[str] = []

    async def body() -> None:
        async with http_api(answering(SERVICE_OBJECT)) as api:
            kube = KubeClient(api.configuration, ClientHooks(before_write=lead.check))
            try:
                if is_connected:
                    await kube.get(SERVICE, "models", "a")
                await kube.create(SERVICE_OBJECT)
            except LeadershipLostError:
                found.append("refused")
            finally:
                await kube.close()
                found.extend(method for method, _ in api.asked)

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
