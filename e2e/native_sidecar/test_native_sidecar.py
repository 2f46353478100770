"""Verdict by traffic and by status: containers that others put into a pod do not speak for the engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import ROUTER_IMAGE, StartLoad
from e2e.helm.helm import Helm
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster, LiveService, deploy_service, is_pod_ready, role_of
from e2e.rolling_update.test_rolling_update import going, is_true
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts
from e2e.watch import State, watching
from tests.controlplane.processes import wait_until

MANIFEST = Path(__file__).parent / "service.yaml"
NAMESPACE, SIDECAR, POLICY = "native-sidecar", "mesh-proxy", "sidecars.e2e.kvasir.dev"
WAITS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()"
NUM_CLIENTS, NUM_TOKENS = 6, 400


@pytest.fixture(scope="module")
def meshed(live_cluster: LiveCluster, kvasir: Helm) -> Iterator[LiveService]:
    """Ready, every pod of it with a sidecar."""
    with live_cluster.namespace(NAMESPACE) as namespace:
        live_cluster.apply(policy(namespace), binding())
        try:
            wait_until(lambda: is_injected(live_cluster, namespace), 60, "the policy to be followed", POLL_SECONDS)
            service = deploy_service(live_cluster, MANIFEST, namespace)
            service.wait_ready()
            assert all(SIDECAR in init_containers(pod) for role in ("serve", "router") for pod in service.pods(role))
            yield service
        finally:
            live_cluster.kubectl("delete", "mutatingadmissionpolicybinding,mutatingadmissionpolicy", POLICY)


def test_an_update_takes_no_serving_pod_away(meshed: LiveService, start_load: StartLoad, verdicts: Verdicts) -> None:
    old = meshed.staying_uids("serve")
    with (
        start_load(meshed, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load,
        watching(meshed.cluster, "pods", meshed.namespace) as pods,
    ):
        changed_at = time.time()
        meshed.patch({"engine": {"maxNumSeqs": 24}})
        gone_at = max(going(pods, uid)[1] for uid in old)
        meshed.wait_ready()
        load.wait_streams(NUM_CLIENTS)
        verdict = load.stop()
        fewest = min(num_ready(state) for state in pods.states_since(changed_at))
    verdicts.add("native sidecar: rolling update", verdict, f"{fewest} ready at least", update=gone_at - changed_at)
    assert not verdict.failures, verdict
    assert fewest >= 2


def test_an_update_that_cannot_succeed_names_its_cause_and_not_the_sidecar(
    meshed: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    before = meshed.staying_uids("serve")
    with start_load(meshed, answers(NUM_TOKENS), num_clients=NUM_CLIENTS) as load:
        changed_at = time.time()
        meshed.patch({"engine": {"args": ["--no-such-flag"]}})
        degraded = meshed.wait_condition("Degraded", lambda found: found if is_true(found) else None, 90)
        told_after = time.time() - changed_at
        load.wait_streams(NUM_CLIENTS)
        left = meshed.staying_uids("serve")
        meshed.patch({"engine": {"args": []}})
        meshed.wait_ready()
        verdict = load.stop()
    verdicts.add("native sidecar: an update that cannot succeed", verdict, status_says_so=told_after)
    assert "--no-such-flag" in degraded["message"], degraded
    assert before < left
    assert not verdict.failures, verdict


def num_ready(state: State) -> int:
    return sum(role_of(pod) == "serve" and is_pod_ready(pod) for pod in state.values())


def init_containers(pod: KubeObject) -> list[str]:
    return [each["name"] for each in pod["spec"].get("initContainers", [])]


def is_injected(cluster: LiveCluster, namespace: str) -> bool:
    """The API server learns of a policy in its own time: ask by a dry run until it does."""
    probe = ("run", "probe", "--image=nobody.example/probe:1", "--dry-run=server", "--output=yaml")
    return SIDECAR in cluster.kubectl(*probe, f"--namespace={namespace}")


def policy(namespace: str) -> KubeObject:
    container = {"name": SIDECAR, "image": ROUTER_IMAGE, "command": ["python3", "-c", WAITS], "restartPolicy": "Always"}
    fields = ", ".join(f"{json.dumps(name)}: dyn({json.dumps(value)})" for name, value in container.items())
    patch = f'[JSONPatch{{op: "add", path: "/spec/initContainers", value: [{{{fields}}}]}}]'
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    only_here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {"namespaceSelector": only_here, "resourceRules": [pods]},
        "matchConditions": [{"name": "not-the-load", "expression": "object.metadata.?name.orValue('') != 'clients'"}],
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingAdmissionPolicy"}
    return {**kind, "metadata": {"name": POLICY}, "spec": spec}


def binding() -> KubeObject:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY},
        "spec": {"policyName": POLICY},
    }
