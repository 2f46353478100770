"""What the builders render, before a real API server: it is stored as it was sent, and its pods pass admission."""

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
from kubernetes.dynamic.exceptions import ForbiddenError, TooManyRequestsError

from kvasir_operator.api.labels import MAX_NAME_LENGTH
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply.drift import find_drift
from kvasir_operator.desired.objects import CurrentRevision, desired_objects, desired_service
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, POD_MONITOR, STATEFUL_SET, Kind
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import path_of
from .test_optional_kinds import POD_MONITOR_CRD

SETTINGS = OperatorSettings(image_pull_secret=("mirror",))
# Every field of a pod, and what else of a manifest goes into an object as it is.
EVERY_POD_FIELD: dict[str, Any] = {
    "image": "registry.example/mine:1",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "own"}],
    "securityContext": {"runAsUser": 1000, "supplementalGroups": [7], "capabilities": {"add": ["IPC_LOCK"]}},
    "volumes": [
        {"mountPath": "/ca", "configMap": {"name": "ca"}},
        {"mountPath": "/s", "secret": {"name": "s"}},
        {"mountPath": "/files", "claim": {"name": "files"}},
    ],
    "labels": {"team": "search"},
    "annotations": {"note": "x"},
    "env": [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
}
EVERYTHING: dict[str, Any] = {
    "model": {"source": "oci://registry.example/model:1", "name": "big", "aliases": ["b"]},
    "engine": {"speculative": {"method": "draftModel", "model": "pvc://drafts/small"}},
    "resources": {
        "memory": "2048Mi",
        "sharedMemory": "1024Mi",
        "extra": {"rdma/ib": 1, "ephemeral-storage": "1024Mi"},
        "claims": [{"name": "gpu", "resourceClaimTemplateName": "one"}, {"name": "nic", "resourceClaimName": "two"}],
    },
    "pod": EVERY_POD_FIELD,
    "router": {
        "pod": EVERY_POD_FIELD,
        "apiKeysSecretRef": {"name": "keys"},
        "service": {"type": "LoadBalancer", "annotations": {"cloud.example/internal": "true"}},
    },
    "replicas": 3,
}
DOWNLOADED = {"source": "hf://org/name", "secretRef": {"name": "hf-token"}, "cache": {"sizeLimit": "20480Mi"}}
GROUPS: dict[str, Any] = {"parallelism": {"tensor": 2, "pipeline": 2}, "replicas": 2}
TENSOR_GROUP: dict[str, Any] = {"parallelism": {"tensor": 4}, "resources": {"maxDevices": 2}}
QUEUED: dict[str, Any] = {**GROUPS, "pod": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
VOLCANOS: dict[str, Any] = {**GROUPS, "pod": {"schedulerName": "volcano"}}
LONGEST_NAME = "a" * MAX_NAME_LENGTH
SPLIT: dict[str, Any] = {"disaggregation": {"prefill": {"parallelism": {"pipeline": 2}}, "decode": {"replicas": 2}}}
EVERY_SHARED_KIND = {
    "NetworkPolicy",
    "PodDisruptionBudget",
    "PodMonitor",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
    "Deployment",
}
IDS = ("runAsUser", "runAsGroup", "fsGroup")
COMBINATIONS = list(chain.from_iterable(combinations(IDS, number) for number in range(len(IDS) + 1)))


def service(namespace: str, name: str = "llama", **spec: Any) -> InferenceService:
    metadata = {"name": name, "namespace": namespace}
    kind = {"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}
    return parse_service({**kind, "metadata": metadata, "spec": {"model": {"source": "pvc://models"}, **spec}})


@pytest.fixture
def restricted(control_plane: ControlPlane, namespace: str) -> str:
    """A namespace whose pods must pass the strictest level of Pod Security."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    control_plane.apply(manifest, field_manager="pod-security")
    return namespace


def create_pods(control_plane: ControlPlane, wanted: InferenceService) -> int:
    """Asks for one pod of each workload and keeps none. Raises ForbiddenError where admission refuses one."""
    objects = desired_objects(wanted, SETTINGS)
    for account in (child for child in objects if child["kind"] == "ServiceAccount"):
        control_plane.apply(account)
    templates = [child["spec"]["template"] for child in objects if child["kind"] in ("Deployment", "StatefulSet")]
    for template in templates:
        metadata = {**template["metadata"], "generateName": "pod-"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        path = f"/api/v1/namespaces/{wanted.namespace}/pods"
        control_plane.request("post", path, pod, dryRun="All", fieldValidation="Strict")
    return len(templates)


@pytest.mark.parametrize(
    "spec",
    [{}, EVERYTHING, GROUPS, TENSOR_GROUP, SPLIT, {"model": DOWNLOADED}],
    ids=["the least", "everything", "groups", "a tensor group", "two roles", "downloaded"],
)
def test_an_object_is_stored_as_it_was_sent(control_plane: ControlPlane, namespace: str, spec: dict[str, Any]) -> None:
    for wanted in desired_objects(service(namespace, **spec), SETTINGS):
        assert find_drift(wanted, control_plane.apply(wanted)) == [], wanted["kind"]


@pytest.mark.parametrize("spec", [QUEUED, VOLCANOS], ids=["Kueue", "Volcano"])
def test_what_names_a_group_to_a_gang_scheduler_is_stored_and_its_pods_are_admitted(
    control_plane: ControlPlane, namespace: str, spec: dict[str, Any]
) -> None:
    """Keys and values are labels and annotations, which Kubernetes checks by their form: those of the longest name."""
    wanted = service(namespace, LONGEST_NAME, **spec)
    for child in desired_objects(wanted, SETTINGS):
        assert find_drift(child, control_plane.apply(child)) == [], child["kind"]
    assert create_pods(control_plane, wanted) > 0


@pytest.fixture
def pod_monitors(control_plane: ControlPlane, namespace: str) -> Iterator[None]:
    """The kind is served for the test's time."""
    path = path_of(POD_MONITOR, namespace)
    control_plane.install_crd(POD_MONITOR_CRD)
    wait_until(lambda: is_served(control_plane, path), 30, "PodMonitors to be served")
    yield
    control_plane.remove_crd(POD_MONITOR_CRD["metadata"]["name"])


def is_served(control_plane: ControlPlane, path: str) -> bool:
    """Not yet while the API server asks to be left alone, as it does at first."""
    try:
        return control_plane.exists(path)
    except TooManyRequestsError:
        return False


@pytest.mark.parametrize(
    ("spec", "group_kind"),
    [({"replicas": 2}, STATEFUL_SET), (SPLIT, STATEFUL_SET), (GROUPS, LEADER_WORKER_SET)],
    ids=["one role", "two roles and a group", "groups as LeaderWorkerSets"],
)
@pytest.mark.usefixtures("pod_monitors")
def test_every_child_of_a_service_with_the_longest_name_is_stored_as_it_was_sent(
    control_plane: ControlPlane, namespace: str, spec: dict[str, Any], group_kind: Kind
) -> None:
    longest = service(namespace, "a" * 63, **spec)
    wanted = desired_service(longest, SETTINGS, with_pod_monitors=True, group_kind=group_kind)
    children = wanted.objects(CurrentRevision(wanted.revision, 1, wanted.replicas))
    for child in children:
        assert find_drift(child, control_plane.apply(child)) == [], child["kind"]
    assert {child["kind"] for child in children} >= EVERY_SHARED_KIND


@pytest.mark.parametrize("named", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
def test_pods_pass_the_restricted_level_whichever_ids_are_left_to_the_platform(
    control_plane: ControlPlane, restricted: str, named: tuple[str, ...]
) -> None:
    pod = {
        "securityContext": dict.fromkeys(named, 1000),
        "volumes": [{"mountPath": "/ca", "configMap": {"name": "ca"}}, {"mountPath": "/s", "secret": {"name": "s"}}],
    }
    router = {"pod": pod, "apiKeysSecretRef": {"name": "keys"}}

    assert create_pods(control_plane, service(restricted, pod=pod, router=router)) == 2


def test_pods_of_groups_pass_too(control_plane: ControlPlane, restricted: str) -> None:
    assert create_pods(control_plane, service(restricted, parallelism={"pipeline": 2})) == 2


@pytest.mark.parametrize("model", [{"source": "oci://registry.example/model:1"}, DOWNLOADED], ids=["image", "download"])
def test_a_model_that_is_no_folder_of_a_node_passes_too(
    control_plane: ControlPlane, restricted: str, model: dict[str, Any]
) -> None:
    assert create_pods(control_plane, service(restricted, model=model)) == 2


@pytest.mark.parametrize(
    "spec", [{"model": {"source": "file:///models/m"}}, {"pod": {"securityContext": {"runAsNonRoot": None}}}]
)
def test_what_a_manifest_opens_on_purpose_is_refused_there(
    control_plane: ControlPlane, restricted: str, spec: dict[str, Any]
) -> None:
    with pytest.raises(ForbiddenError, match="violates PodSecurity"):
        create_pods(control_plane, service(restricted, **spec))
