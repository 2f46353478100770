"""The router follows an InferenceService's EndpointSlices on the real API server."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, ROLE_SERVE, SERVICE_LABEL
from kvasir_router.endpoints.endpoint import Address
from kvasir_router.endpoints.kubernetes import KubernetesSource, ServiceReference
from kvasir_router.endpoints.kubernetes_api import connect

LIMIT_SECONDS = 30


class Follower:
    """A KubernetesSource on a thread and event loop of its own; hands over every published set of URLs."""

    def __init__(self, service: ServiceReference) -> None:
        self._service = service
        self._published: queue.Queue[set[str]] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        async with connect(self._service) as api:
            await KubernetesSource(api, self._service.port).run(self._publish)

    def _publish(self, addresses: frozenset[Address]) -> None:
        self._published.put({address.url for address in addresses})

    def wait_for(self, expected: set[str]) -> None:
        while self._published.get(timeout=LIMIT_SECONDS) != expected:
            continue  # queue.Empty ends the test when nothing more is published

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(LIMIT_SECONDS)


def endpoint_slice(namespace: str, name: str, *endpoints: tuple[str, bool]) -> dict[str, Any]:
    labels = {SERVICE_LABEL: "llama", ROLE_LABEL: ROLE_SERVE, REVISION_LABEL: "5f0c1e2d3a"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": [{"addresses": [ip], "conditions": {"ready": is_ready}} for ip, is_ready in endpoints],
    }


@pytest.fixture
def follower(control_plane, namespace, monkeypatch) -> Iterator[Follower]:
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(control_plane.operator_kubeconfig)
    )
    control_plane.apply(endpoint_slice(namespace, "llama-a", ("10.244.9.1", True), ("10.244.9.2", False)))
    follower = Follower(ServiceReference(namespace, "llama", "http"))
    yield follower
    follower.stop()


def test_ready_addresses_are_published_as_slices_come_change_and_go(control_plane, namespace, follower):
    follower.wait_for({"http://10.244.9.1:8000"})
    control_plane.apply(endpoint_slice(namespace, "llama-a", ("10.244.9.1", True), ("10.244.9.2", True)))
    follower.wait_for({"http://10.244.9.1:8000", "http://10.244.9.2:8000"})
    control_plane.apply(endpoint_slice(namespace, "llama-b", ("10.244.9.3", True)))
    follower.wait_for({f"http://10.244.9.{number}:8000" for number in (1, 2, 3)})
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/llama-a"
    control_plane.request("delete", path)
    follower.wait_for({"http://10.244.9.3:8000"})
