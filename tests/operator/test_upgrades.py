"""An upgrade of the installation replaces the engines of so many services at a time, and the others serve on."""

import asyncio
from typing import Any

from kvasir_operator.api.labels import ROLE_LABEL, SERVICE_LABEL
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.settings import OperatorSettings

from .cluster_objects import NOW, pod, service
from .memory_kube import MemoryKube

SPEC = {"model": {"source": "pvc://checkpoints/model"}, "engine": {"device": "cpu"}, "replicas": 1}


class Installation:
    """Services that serve with what one release gave them; then another release's operator."""

    def __init__(self, *names: str) -> None:
        self.kube = MemoryKube()
        for name in names:
            self.kube.objects[(INFERENCE_SERVICE.kind, "models", name)] = {**service(name, f"uid-{name}"), "spec": SPEC}
        self._operator = self._started("engine:1")
        for name in names:
            self.pass_over(name)
            self.start_pods(name)
            self.pass_over(name)

    def upgrade(self, max_upgrades: int | None) -> None:
        self._operator = self._started("engine:2", max_upgrades)

    def pass_over(self, name: str) -> Outcome:
        return asyncio.run(self._operator.reconcile(ServiceKey("models", name)))

    def start_pods(self, name: str) -> None:
        """One for each workload that asks for some; those of others go."""
        own = [key for key in self.kube.objects if key[0] == "Pod" and key[2].startswith(f"{name}-")]
        for key in own:
            del self.kube.objects[key]
        for each in self.engines(name):
            if each["spec"]["replicas"]:
                started = pod(f"{each['metadata']['name']}-0")
                started["metadata"]["labels"] = each["spec"]["template"]["metadata"]["labels"]
                self.kube.objects[("Pod", "models", started["metadata"]["name"])] = started

    def engines(self, name: str) -> list[dict[str, Any]]:
        wanted = {SERVICE_LABEL: name, ROLE_LABEL: "serve"}.items()
        found = [obj for (kind, *_), obj in self.kube.objects.items() if kind == "Deployment"]
        return [obj for obj in found if wanted <= obj["metadata"]["labels"].items()]

    def images(self, name: str) -> dict[str, int]:
        """Replicas by image."""
        return {
            each["spec"]["template"]["spec"]["containers"][0]["image"]: each["spec"]["replicas"]
            for each in self.engines(name)
        }

    def conditions(self, name: str) -> dict[str, str]:
        status = self.kube.objects[(INFERENCE_SERVICE.kind, "models", name)]["status"]
        return {each["type"]: each["reason"] for each in status["conditions"]}

    def _started(self, image: str, max_upgrades: int | None = None) -> Reconciler:
        gateway = GatewayObserver(self.kube, None, None, lambda key: None)
        settings = OperatorSettings(runtime_image=image, max_upgrades=max_upgrades)
        return Reconciler(self.kube, settings, lambda: frozenset(), gateway, lambda: NOW)


def test_one_after_the_other_is_upgraded_and_the_others_serve_on() -> None:
    fleet = Installation("a", "b")
    fleet.upgrade(max_upgrades=1)
    for name in ("a", "b"):
        outcome = fleet.pass_over(name)
    assert fleet.images("a")["engine:2"] == 1
    assert fleet.images("b") == {"engine:1": 1, "engine:2": 0}
    assert fleet.conditions("b")["Progressing"] == "RolloutWaiting"
    assert outcome.retry_seconds is not None
    fleet.start_pods("a")
    for _ in range(3):  # the former workload goes to zero, and is seen there
        fleet.pass_over("a")
    fleet.pass_over("b")
    assert fleet.images("b")["engine:2"] == 1


def test_without_a_limit_all_are_upgraded_at_once() -> None:
    fleet = Installation("a", "b")
    fleet.upgrade(max_upgrades=None)
    for name in ("a", "b"):
        fleet.pass_over(name)
    assert (fleet.images("a")["engine:2"], fleet.images("b")["engine:2"]) == (1, 1)


def test_a_change_of_the_manifest_does_not_wait() -> None:
    fleet = Installation("a", "b")
    fleet.upgrade(max_upgrades=1)
    fleet.pass_over("a")
    changed = fleet.kube.objects[(INFERENCE_SERVICE.kind, "models", "b")]
    changed["spec"] = {**SPEC, "engine": {"device": "cpu", "maxNumSeqs": 8}}
    changed["metadata"]["generation"] += 1
    for _ in range(2):  # the second finds what it began under way
        fleet.pass_over("b")
    assert fleet.images("b")["engine:2"] == 1


def test_a_service_that_is_deleted_makes_way() -> None:
    fleet = Installation("a", "b")
    fleet.upgrade(max_upgrades=1)
    fleet.pass_over("a")
    del fleet.kube.objects[(INFERENCE_SERVICE.kind, "models", "a")]
    for name in ("a", "b"):
        fleet.pass_over(name)
    assert fleet.images("b")["engine:2"] == 1
