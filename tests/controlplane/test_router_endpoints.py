"""On the real API server a router follows a service's EndpointSlices, and a gateway all services of a namespace."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import pytest
from tests.controlplane.reconciling import manifest, path_of

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, ROLE_SERVE, SERVICE_LABEL
from kvasir_operator.kube.kinds import INFERENCE_SERVICE
from kvasir_router.endpoints.address import Address
from kvasir_router.endpoints.gateway_source import GatewaySource, ScopeApi, ServedService
from kvasir_router.endpoints.kubernetes import KubernetesSource, ServiceReference
from kvasir_router.endpoints.kubernetes_api import KubernetesApi, connect
from kvasir_router.endpoints.objects import ObjectKey

LIMIT_SECONDS = 30
GATEWAY = {"mode": "gateway"}


class Follower:
    """A source on a thread and event loop of its own; hands over everything that it publishes."""

    def __init__(self, follow: Callable[[KubernetesApi, Callable[[Any], None]], Coroutine[Any, Any, None]]) -> None:
        self._follow_with = follow
        self._published: queue.Queue[Any] = queue.Queue()
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
        async with connect() as api:
            await self._follow_with(api, self._published.put)

    def wait_for(self, expected: Any) -> None:
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
def following(control_plane, monkeypatch) -> Iterator[Callable[..., Follower]]:
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(control_plane.operator_kubeconfig)
    )
    with contextlib.ExitStack() as stack:

        def start(*arguments: Any) -> Follower:
            follower = Follower(*arguments)
            stack.callback(follower.stop)
            return follower

        yield start


def urls(addresses: Iterable[Address]) -> set[str]:
    return {address.url for address in addresses}


@pytest.fixture
def follower(control_plane, namespace, following) -> Follower:
    """Of one service; what it publishes are URLs."""
    control_plane.apply(endpoint_slice(namespace, "llama-a", ("10.244.9.1", True), ("10.244.9.2", False)))
    service = ServiceReference(namespace, "llama", "http")

    async def follow(api: KubernetesApi, publish: Callable[[Any], None]) -> None:
        await KubernetesSource(api.slices_of(service), service.port).run(lambda found: publish(urls(found)))

    return following(follow)


def test_ready_addresses_are_published_as_slices_come_change_and_go(control_plane, namespace, follower):
    follower.wait_for({"http://10.244.9.1:8000"})
    control_plane.apply(endpoint_slice(namespace, "llama-a", ("10.244.9.1", True), ("10.244.9.2", True)))
    follower.wait_for({"http://10.244.9.1:8000", "http://10.244.9.2:8000"})
    control_plane.apply(endpoint_slice(namespace, "llama-b", ("10.244.9.3", True)))
    follower.wait_for({f"http://10.244.9.{number}:8000" for number in (1, 2, 3)})
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/llama-a"
    control_plane.request("delete", path)
    follower.wait_for({"http://10.244.9.3:8000"})


def test_a_gateway_hears_of_a_namespaces_services_with_their_engines(control_plane, namespace, following):
    async def follow(api: KubernetesApi, publish: Callable[[Any], None]) -> None:
        def on_change(changed: Mapping[ObjectKey, ServedService | None]) -> None:
            publish(
                {key[1]: served and (served.manifest.names, urls(served.addresses)) for key, served in changed.items()}
            )

        await GatewaySource([ScopeApi(api.inference_services(namespace), api.slices(namespace))]).run(on_change)

    control_plane.apply(manifest(namespace, "llama", model={"source": "pvc://m", "aliases": ["gpt"]}, router=GATEWAY))
    follower = following(follow)
    follower.wait_for({"llama": (("llama", "gpt"), set())})
    control_plane.apply(endpoint_slice(namespace, "llama-a", ("10.244.9.1", True)))
    follower.wait_for({"llama": (("llama", "gpt"), {"http://10.244.9.1:8000"})})
    control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, "llama"))
    follower.wait_for({"llama": None})
