"""Passes over services behind the gateway: their objects, the router that goes, and whose names are whose."""

import asyncio
from typing import Any

import pytest

from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, ServiceKey
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.reconcile import Reconciler
from kvasir_operator.settings import OperatorSettings

from .cluster_objects import NOW, service
from .gateways import GATEWAY, WITH_GATEWAY
from .memory_kube import MemoryKube

KEY = ServiceKey("models", "llama")
ROUTER = {"Service", "ServiceAccount", "RoleBinding", "NetworkPolicy", "PodDisruptionBudget", "Deployment"}
OWN_URL = "http://llama-router.models.svc:8080/v1"
GATEWAYS_URL = "http://kvasir-gateway.kvasir.svc:8080/v1"


class Cluster:
    """An API server in memory, with services that are passed over one at a time."""

    def __init__(self, settings: OperatorSettings = WITH_GATEWAY) -> None:
        self.kube = MemoryKube()
        self.settings = settings
        self.set_gateway_ready(True)

    def set_gateway_ready(self, is_ready: bool) -> None:
        metadata = {"namespace": GATEWAY.namespace, "name": GATEWAY.name}
        status = {"readyReplicas": 2} if is_ready else {}
        self.kube.objects[(DEPLOYMENT.kind, GATEWAY.namespace, GATEWAY.name)] = {"metadata": metadata, "status": status}

    def apply(self, name: str = "llama", mode: str = "gateway", created: str = NOW, **spec: Any) -> None:
        key = (INFERENCE_SERVICE.kind, "models", name)
        obj = self.kube.objects.get(key) or service(name, f"uid-of-{name}")
        obj["metadata"]["creationTimestamp"] = created
        model = {"source": "pvc://checkpoints/model", **spec.pop("model", {})}
        self.kube.objects[key] = {**obj, "spec": {"model": model, "router": {"mode": mode}, **spec}}

    def reconcile(self, name: str = "llama") -> dict[str, Any]:
        """The status after a pass of an operator that knows nothing of earlier ones."""
        gateway = GatewayObserver(self.kube, self.settings.defaults.gateway, None, lambda key: None)
        features = frozenset()
        reconciler = Reconciler(self.kube, self.settings, lambda: features, gateway, lambda: NOW)
        asyncio.run(reconciler.reconcile(ServiceKey("models", name)))
        status: dict[str, Any] = self.kube.objects[(INFERENCE_SERVICE.kind, "models", name)]["status"]
        return status

    def of_router(self) -> set[str]:
        """Kinds of the objects of the service's own router."""
        return {kind for kind, _, name in self.kube.objects if name == "llama-router"} - {"Secret"}

    def start_engines(self, number: int) -> None:
        """The Deployments' controller has made the pods of every engine that there is."""
        for (kind, *_, name), obj in self.kube.objects.items():
            if kind == DEPLOYMENT.kind and name.startswith("llama-serve"):
                obj["status"] = {"observedGeneration": 0, "replicas": number, "updatedReplicas": number}


def reasons(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def test_a_service_behind_the_gateway_has_no_router_and_the_gateways_address() -> None:
    cluster = Cluster()
    cluster.apply()
    status = cluster.reconcile()
    assert cluster.of_router() == set()
    assert status["url"] == GATEWAYS_URL
    assert [role["role"] for role in status["roles"]] == ["serve"]


def test_a_second_pass_writes_nothing() -> None:
    cluster = Cluster()
    cluster.apply()
    cluster.reconcile()
    cluster.kube.writes.clear()
    cluster.reconcile()
    assert cluster.kube.writes == []


def test_a_router_that_the_gateway_replaces_goes_with_all_that_belongs_to_it() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    assert cluster.reconcile()["url"] == OWN_URL
    assert cluster.of_router() == ROUTER
    cluster.apply()
    cluster.reconcile()  # engines that had not even begun go first
    status = cluster.reconcile()
    assert cluster.of_router() == set()
    assert status["url"] == GATEWAYS_URL
    assert [role["role"] for role in status["roles"]] == ["serve"]


def test_it_stays_while_the_gateway_is_not_ready() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    cluster.set_gateway_ready(False)
    cluster.apply()
    cluster.reconcile()
    assert cluster.of_router() == ROUTER
    cluster.set_gateway_ready(True)
    cluster.reconcile()
    assert cluster.of_router() == set()


def test_it_stays_while_engines_are_left_that_believe_nobody_else() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    cluster.start_engines(1)
    cluster.apply()
    cluster.reconcile()
    assert cluster.of_router() == ROUTER


def test_it_goes_at_once_where_the_service_is_suspended_too() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    cluster.set_gateway_ready(False)
    cluster.apply(suspend=True)
    cluster.reconcile()
    assert cluster.of_router() == set()


def test_a_service_that_asks_for_a_gateway_that_is_not_there_goes_on_as_it_was() -> None:
    cluster = Cluster(OperatorSettings())
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    cluster.start_engines(1)
    cluster.apply()
    status = cluster.reconcile()
    assert cluster.of_router() == ROUTER
    assert status["url"] == OWN_URL
    assert reasons(status)["Degraded"] == ("True", "UnsupportedFeature")
    engines = [obj for (kind, *_, name), obj in cluster.kube.objects.items() if name.startswith("llama-serve")]
    assert sorted(each["spec"]["replicas"] for each in engines if each["kind"] == "Deployment") == [0, 1]


def test_a_new_one_gets_no_pods_and_no_address() -> None:
    cluster = Cluster(OperatorSettings())
    cluster.apply()
    status = cluster.reconcile()
    assert "url" not in status
    assert status["ready"] == "0/1"
    assert {name: reasons(status)[name] for name in ("Ready", "Routable", "Degraded")} == {
        "Ready": ("False", "UnsupportedFeature"),
        "Routable": ("False", "UnsupportedFeature"),
        "Degraded": ("True", "UnsupportedFeature"),
    }


def test_a_budget_that_a_router_of_the_services_own_no_longer_needs_goes_as_ever() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    cluster.apply(mode="dedicated", router={"replicas": 1})
    cluster.reconcile()
    assert cluster.of_router() == ROUTER - {"PodDisruptionBudget"}


def test_a_service_that_leaves_the_gateway_gets_a_router_and_its_old_secret() -> None:
    cluster = Cluster()
    cluster.apply(mode="dedicated")
    cluster.reconcile()
    secret = cluster.kube.objects[("Secret", "models", "llama-router")]
    cluster.apply()
    cluster.reconcile()
    cluster.apply(mode="dedicated")
    assert cluster.reconcile()["url"] == OWN_URL
    assert cluster.of_router() == ROUTER
    assert cluster.kube.objects[("Secret", "models", "llama-router")] == secret


def test_the_later_of_two_services_with_one_name_is_refused_until_the_other_lets_go_of_it() -> None:
    cluster = Cluster()
    cluster.apply("llama", created="2026-11-20T10:00:01Z", model={"name": "big"})
    cluster.apply("older", created="2026-11-20T10:00:00Z", model={"name": "big"})
    refused = cluster.reconcile("llama")
    assert reasons(refused)["Ready"] == ("False", "ModelNameTaken")
    assert reasons(refused)["Degraded"] == ("True", "ModelNameTaken")
    assert reasons(cluster.reconcile("older"))["Degraded"] == ("False", "AsExpected")
    cluster.apply("older", created="2026-11-20T10:00:00Z", model={"name": "other"})
    assert reasons(cluster.reconcile("llama"))["Degraded"] == ("False", "AsExpected")
    events = [obj["reason"] for (kind, *_), obj in cluster.kube.objects.items() if kind == "Event"]
    assert "ModelNameTaken" in events
    assert "Recovered" in events


def test_a_refused_service_keeps_the_router_that_serves_it() -> None:
    cluster = Cluster()
    cluster.apply("older", created="2026-11-20T09:00:00Z", model={"name": "big"})
    cluster.apply(mode="dedicated", model={"name": "big"})
    cluster.reconcile()
    cluster.apply(model={"name": "big"})
    cluster.reconcile()
    assert cluster.of_router() == ROUTER


@pytest.mark.parametrize("mode", ["dedicated", "gateway"])
def test_a_service_that_is_deleted_lets_go_of_its_names(mode: str) -> None:
    cluster, woken = Cluster(), list[ServiceKey]()
    cluster.apply("older", created="2026-11-20T09:00:00Z", model={"name": "big"})
    cluster.apply("llama", mode=mode, model={"name": "big"})
    gateway = GatewayObserver(cluster.kube, GATEWAY, None, woken.append)
    reconciler = Reconciler(cluster.kube, WITH_GATEWAY, lambda: frozenset(), gateway, lambda: NOW)

    async def body() -> None:
        await reconciler.reconcile(ServiceKey("models", "older"))
        woken.clear()
        del cluster.kube.objects[(INFERENCE_SERVICE.kind, "models", "older")]  # of which no event tells
        await reconciler.reconcile(ServiceKey("models", "older"))

    asyncio.run(body())
    assert woken == ([KEY] if mode == "gateway" else [])
