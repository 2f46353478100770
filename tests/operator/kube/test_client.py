"""What the client's owner hears of its requests; the rest is tested against a real API server."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from kvasir_operator.errors import KindNotServedError, KubeApiError, LeadershipLostError, ObjectRefusedError
from kvasir_operator.kube.client import ClientHooks, KubeClient
from kvasir_operator.kube.kinds import POD_MONITOR, SERVICE, Kind


class OpenedKube(KubeClient):
    """With its two ways of sending in sight."""

    async def write(self, kind: Kind, call: Callable[[], Any]) -> None:
        await self._write("apply", kind, "models", "llama", call)


def sent(kind: Kind, hooks: ClientHooks, error: KubeApiError | None = None) -> list[str]:
    """What reached the API server of one write."""
    requests: list[str] = []

    async def call() -> dict[str, Any]:
        requests.append(kind.kind)
        if error is not None:
            raise error
        return {}

    async def body() -> None:
        kube = OpenedKube(Configuration(), hooks)
        try:
            await kube.write(kind, call)
        except KubeApiError:
            assert error is not None
        finally:
            await kube.close()

    asyncio.run(body())
    return requests


def test_a_write_that_its_hook_forbids_is_not_sent() -> None:
    def forbid() -> None:
        raise LeadershipLostError("another leads")

    with pytest.raises(LeadershipLostError):
        assert sent(SERVICE, ClientHooks(before_write=forbid)) == []


def test_every_request_is_told_of_with_what_came_of_it() -> None:
    told: list[tuple[str, str, Exception | None]] = []
    hooks = ClientHooks(on_request=lambda verb, kind, error: told.append((verb, kind, error)))
    refused = ObjectRefusedError("no")
    sent(SERVICE, hooks, refused)
    sent(SERVICE, hooks)
    assert told == [("apply", "Service", refused), ("apply", "Service", None)]


@pytest.mark.parametrize(("kind", "num_reports"), [(POD_MONITOR, 1), (SERVICE, 0)])
def test_an_optional_kind_that_is_not_known_is_reported(kind: Kind, num_reports: int) -> None:
    reports: list[int] = []
    sent(kind, ClientHooks(on_kind_not_served=lambda: reports.append(1)), KindNotServedError("no such kind", 404))
    assert len(reports) == num_reports
