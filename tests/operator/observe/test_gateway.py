"""What passes learn of the gateway, and whom its changes wake."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.operator.gateways import GATEWAY
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.errors import KubeUnavailableError
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, ServiceKey
from kvasir_operator.observe.gateway import GatewayObserver

LLAMA, QWEN = ServiceKey("models", "llama"), ServiceKey("models", "qwen")


def service(name: str, model: str, mode: str = "gateway", minute: int = 0) -> dict[str, Any]:
    metadata = {
        "namespace": "models",
        "name": name,
        "creationTimestamp": f"2026-11-20T10:{minute:02}:00Z",
        "resourceVersion": "1",
    }
    spec = {"model": {"source": "pvc://m", "name": model}, "router": {"mode": mode}}
    return {"apiVersion": INFERENCE_SERVICE.api_version, "kind": INFERENCE_SERVICE.kind} | {
        "metadata": metadata,
        "spec": spec,
    }


class Cluster:
    """An observer over an API server in memory, and whom it woke."""

    def __init__(self, *services: dict[str, Any], ready: int | None = 1) -> None:
        self.kube = MemoryKube()
        for each in services:
            self.kube.objects[(INFERENCE_SERVICE.kind, "models", each["metadata"]["name"])] = each
        if ready is not None:
            self.set_ready(ready)
        self.woken: list[ServiceKey] = []
        self.observer = GatewayObserver(self.kube, GATEWAY, None, self.woken.append)

    def set_ready(self, number: int) -> None:
        metadata = {"namespace": GATEWAY.namespace, "name": GATEWAY.name}
        status = {"readyReplicas": number} if number else {}  # as Kubernetes leaves zeros out
        key = (DEPLOYMENT.kind, GATEWAY.namespace, GATEWAY.name)
        self.kube.objects[key] = {"kind": "Deployment", "apiVersion": "apps/v1", "metadata": metadata, "status": status}


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_service_that_nothing_was_heard_of_yet_knows_the_older_one_that_has_its_name() -> None:
    cluster = Cluster(service("llama", "big"), service("qwen", "big", minute=1))

    async def body() -> None:
        state = await cluster.observer.state_of(service("qwen", "big", minute=1))
        assert state is not None
        assert (state.names, state.taken, state.is_refused, state.serves) == (("big",), {"big": LLAMA}, True, False)

    run(body)


def test_services_are_listed_once() -> None:
    cluster = Cluster(service("llama", "big"))

    async def body() -> None:
        await cluster.observer.state_of(service("llama", "big"))
        cluster.kube.failures = [None, KubeUnavailableError("listed again")]
        await asyncio.gather(*(cluster.observer.state_of(service("llama", "big")) for _ in range(3)))

    run(body)
    assert len(cluster.kube.failures) == 2


@pytest.mark.parametrize("obj", [service("llama", "big", "dedicated"), service("llama", "big")])
def test_there_is_nothing_to_know_without_a_gateway_or_for_a_service_of_a_router_of_its_own(
    obj: dict[str, Any],
) -> None:
    async def body() -> None:
        has_gateway = obj["spec"]["router"]["mode"] == "dedicated"
        observer = GatewayObserver(MemoryKube(), GATEWAY if has_gateway else None, None, lambda key: None)
        assert await observer.state_of(obj) is None

    run(body)


@pytest.mark.parametrize(("ready", "is_ready"), [(None, False), (0, False), (1, True), (3, True)])
def test_the_gateway_is_ready_by_its_first_pod(ready: int | None, is_ready: bool) -> None:
    async def body() -> None:
        state = await Cluster(ready=ready).observer.state_of(service("llama", "big"))
        assert state is not None
        assert (state.is_ready, state.serves) == (is_ready, is_ready)

    run(body)


def test_what_cannot_be_asked_for_is_not_guessed() -> None:
    cluster = Cluster()
    cluster.kube.failures = [None, KubeUnavailableError("down")]

    async def body() -> None:
        with pytest.raises(KubeUnavailableError):
            await cluster.observer.state_of(service("llama", "big"))

    run(body)


def test_who_waits_for_a_name_is_woken_when_its_owner_is_deleted() -> None:
    cluster = Cluster(service("llama", "big"), service("qwen", "big", minute=1))

    async def body() -> None:
        await cluster.observer.state_of(service("qwen", "big", minute=1))
        cluster.woken.clear()
        cluster.observer.forget(LLAMA)
        state = await cluster.observer.state_of(service("qwen", "big", minute=1))
        assert state is not None
        assert state.taken == {}

    run(body)
    assert cluster.woken == [QWEN]


def test_every_service_behind_the_gateway_is_woken_when_it_comes_and_goes_and_never_between() -> None:
    cluster = Cluster(service("llama", "a"), service("qwen", "b"), service("own", "c", "dedicated"))

    async def until_woken(number: int) -> set[ServiceKey]:
        while len(cluster.woken) < number:  # noqa: ASYNC110, a list has no event
            await asyncio.sleep(0.001)
        woken, cluster.woken[:] = set(cluster.woken), []
        return woken

    async def body() -> None:
        await cluster.observer.state_of(service("llama", "a"))
        cluster.woken.clear()
        running = asyncio.create_task(cluster.observer.run(look_seconds=0.001))
        cluster.set_ready(0)
        assert await until_woken(2) == {LLAMA, QWEN}
        cluster.kube.failures = [KubeUnavailableError("down")] * 3
        cluster.set_ready(2)
        assert await until_woken(2) == {LLAMA, QWEN}
        running.cancel()

    run(body)
    assert cluster.woken == []
