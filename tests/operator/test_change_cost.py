"""What a change of a spec takes in passes and requests, which is what a burst of changes costs the operator and the API
server. A number here may fall; one that rises needs a reason in docs/decisions/0009."""

import asyncio
from collections import Counter
from typing import Any, Literal

import pytest

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL
from kvasir_operator.kube.cached import CachedClient
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, POD, Kind, ServiceKey
from kvasir_operator.observe.cache import InformerCache
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.reconcile import Outcome, Reconciler
from kvasir_operator.settings import OperatorSettings

from .cluster_objects import NOW, pod, service
from .memory_kube import MemoryKube

KEY = ServiceKey("models", "llama")
PodState = Literal["ready", "waiting", "unbound"]
"""`waiting`: on a node, and not ready."""
SPEC = {"model": {"source": "pvc://checkpoints/model"}, "engine": {"device": "cpu"}, "replicas": 2}


class Cluster(CachedClient, MemoryKube):
    """Knows services by their informer; counts reads of single objects. Deployments make their pods between passes."""

    def __init__(self) -> None:
        MemoryKube.__init__(self)
        self._cache = InformerCache()
        self._cache.finish_list(INFERENCE_SERVICE, None, (), 0)
        self.reads: Counter[str] = Counter()

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any] | None:
        if kind != INFERENCE_SERVICE:
            self.reads[kind.kind] += 1
        return await super().get(kind, namespace, name)

    async def apply_status(self, obj: dict[str, Any]) -> dict[str, Any]:
        stored = await super().apply_status(obj)
        self._cache.put_own(INFERENCE_SERVICE, stored)
        return stored

    def change(self, generation: int, **spec: Any) -> None:
        stored = self.objects.get((INFERENCE_SERVICE.kind, *KEY), service())
        metadata = {**stored["metadata"], "generation": generation, "resourceVersion": str(1000 * generation)}
        self._version = 1000 * generation
        changed = {**stored, "metadata": metadata, "spec": {**SPEC, **spec}}
        self.objects[(INFERENCE_SERVICE.kind, *KEY)] = changed
        self._cache.put(INFERENCE_SERVICE, changed)

    def run_controllers(self, *, pods: PodState) -> None:
        for name in [name for kind, _, name in self.objects if kind == POD.kind]:
            del self.objects[(POD.kind, KEY.namespace, name)]
        for deployment in [obj for (kind, _, _), obj in self.objects.items() if kind == DEPLOYMENT.kind]:
            replicas, labels = deployment["spec"]["replicas"], deployment["spec"]["template"]["metadata"]["labels"]
            deployment["status"] = {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": replicas}
            for number in range(replicas):
                made = pod(f"{deployment['metadata']['name']}-{number}", labels[ROLE_LABEL], ready=pods == "ready")
                if pods == "unbound":
                    made |= {"spec": {}, "status": {"phase": "Pending"}}
                made["metadata"]["labels"][REVISION_LABEL] = labels.get(REVISION_LABEL, "")
                self.objects[(POD.kind, KEY.namespace, made["metadata"]["name"])] = {
                    **made,
                    "apiVersion": POD.api_version,
                    "kind": POD.kind,
                }


def settle(cluster: Cluster, reconciler: Reconciler, *, pods: PodState) -> int:
    """Passes until one writes nothing and asks for no other, that one included."""

    async def body() -> int:
        num_passes, outcome, num_written = 0, Outcome(retry_seconds=0.0), -1
        while outcome.retry_seconds is not None or num_written != len(cluster.writes):
            num_written = len(cluster.writes)
            outcome = await reconciler.reconcile(KEY)
            num_passes += 1
            cluster.run_controllers(pods=pods)
        return num_passes

    return asyncio.run(body())


def cost_of_a_change(*, pods: PodState, is_burst: bool) -> tuple[int, Counter[str], Counter[str]]:
    """Passes, writes by verb and kind, and reads by kind, of a change that is a new revision.

    `is_burst`: other services' changes wait until this one's former pods are let go.
    """
    cluster, waiting = Cluster(), [0]

    def do_changes_wait(key: ServiceKey) -> bool:
        waiting[0] -= 1
        return waiting[0] >= 0

    gateway = GatewayObserver(cluster, None, None, lambda key: None)
    features = frozenset()
    reconciler = Reconciler(
        cluster,
        OperatorSettings(),
        lambda: features,
        gateway,
        lambda: NOW,
        do_changes_wait=do_changes_wait,
        clock=lambda: 0.0,
    )
    cluster.change(1)
    settle(cluster, reconciler, pods=pods)
    cluster.writes.clear()
    cluster.reads.clear()
    waiting[0] = 1 if is_burst else 0
    cluster.change(2, engine={"device": "cpu", "maxNumSeqs": 8})
    num_passes = settle(cluster, reconciler, pods=pods)
    writes = Counter(f"{verb.partition(' by ')[0]} {name.split()[0]}" for verb, name in cluster.writes)
    return num_passes, writes, cluster.reads


WAITING = {
    "apply Deployment": 2,
    "apply Service": 1,
    "patch Deployment": 1,
    "delete Service": 1,
    "create Event": 1,
    "apply status InferenceService": 2,
}


def reads_of(num_passes: int, is_burst: bool = False) -> dict[str, int]:
    """What no watch shows: names that are still free, and the Secret in each pass."""
    return {"Deployment": 1, "Service": 1 + is_burst, "Secret": num_passes}


@pytest.mark.parametrize(("is_burst", "num_passes"), [(False, 3), (True, 4)])
def test_a_change_of_a_service_whose_pods_no_node_has_takes_seven_writes(is_burst: bool, num_passes: int) -> None:
    """At full size at once; a burst's Deployment first and alone, and its status once its pods are counted."""
    passes, writes, reads = cost_of_a_change(pods="unbound", is_burst=is_burst)
    expected = {**WAITING, "apply Deployment": 1, "apply status InferenceService": 2 - is_burst}
    assert (passes, writes, reads) == (num_passes, expected, reads_of(num_passes, is_burst))


@pytest.mark.parametrize(("is_burst", "num_passes"), [(False, 4), (True, 5)])
def test_a_change_of_a_service_whose_pods_wait_takes_eight_writes(is_burst: bool, num_passes: int) -> None:
    passes, writes, reads = cost_of_a_change(pods="waiting", is_burst=is_burst)
    assert (passes, writes, reads) == (num_passes, WAITING, reads_of(num_passes, is_burst))


def test_a_service_that_serves_is_let_go_of_pod_by_pod_and_reports_no_more_often() -> None:
    passes, writes, reads = cost_of_a_change(pods="ready", is_burst=False)
    assert (passes, writes, reads) == (6, {**WAITING, "patch Deployment": 2}, reads_of(6))
