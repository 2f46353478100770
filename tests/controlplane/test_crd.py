"""The InferenceService CRD against a real API server: what it accepts, fills in, refuses and serves."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.dynamic.exceptions import BadRequestError, UnprocessibleEntityError
from tests.controlplane.broken_manifests import (
    CONTRADICTIONS,
    JUST_RIGHT,
    MODEL,
    UNKNOWN_FIELDS,
    WRONG_VALUES,
    Broken,
    disaggregated,
)
from tests.controlplane.control_plane import ControlPlane

from kvasir_operator.api.parse import parse_service
from kvasir_operator.errors import InvalidManifestError

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds" / "serving.kvasir.dev_inferenceservices.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
FULL_MANIFESTS = sorted((Path(__file__).parent / "manifests").glob("*.yaml"))
MAX_CRD_BYTES = 110_000  # with room below the 262,144 bytes of an annotation, which `kubectl apply` needs
MERGE_PATCH = "application/merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"

DEFAULT_SPEC = {
    "model": {"source": "hf://org/name"},
    "engine": {
        "device": "auto",
        "dtype": "auto",
        "quantization": "auto",
        "maxNumSeqs": 256,
        "scheduling": "fair",
        "kvTransfer": False,
        "kvCache": {"blockSize": 16, "dtype": "auto", "prefixCaching": True, "hostMemory": "0"},
    },
    "parallelism": {"tensor": 1, "pipeline": 1, "data": 1, "expert": False},
    "replicas": 1,
    "router": {
        "mode": "dedicated",
        "policy": "finishTime",
        "service": {"type": "ClusterIP"},
        "maxQueueSize": 1000,
        "maxQueueWait": "60s",
        "sseKeepaliveInterval": "20s",
    },
    "rollout": {"maxSurge": 1, "maxUnavailable": 0, "drainTimeout": "300s", "drainDelay": "10s", "historyLimit": 2},
    "suspend": False,
    "monitoring": {"podMonitor": "auto"},
}
DEFAULT_AUTOSCALING = {
    "minReplicas": 1,
    "maxReplicas": 4,
    "targetKVCacheUsage": 0.75,
    "scaleToZeroAfter": "10m",
    "behavior": {"scaleUp": {"selectPolicy": "Max"}, "scaleDown": {"selectPolicy": "Max"}},
}


def manifest(namespace: str, spec: dict[str, Any], name: str = "llama") -> dict[str, Any]:
    return {
        "apiVersion": "serving.kvasir.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": MODEL, **spec},
    }


def collection(namespace: str) -> str:
    return f"/apis/serving.kvasir.dev/v1alpha1/namespaces/{namespace}/inferenceservices"


def create(control_plane: ControlPlane, service: dict[str, Any], **query: str) -> dict[str, Any]:
    path = collection(service["metadata"]["namespace"])
    return control_plane.request("post", path, service, fieldValidation="Strict", **query)


def refusals(control_plane: ControlPlane, service: dict[str, Any]) -> set[tuple[str, str]]:
    """(field, message) of each cause for which the API server refuses `service`, list indices left out of the field."""
    with pytest.raises(UnprocessibleEntityError) as refused:
        create(control_plane, service, dryRun="All")
    causes = json.loads(refused.value.body or "")["details"]["causes"]
    return {(re.sub(r"\[\d+\]", "[]", cause["field"]), cause["message"]) for cause in causes}


def is_refused_as(broken: Broken, seen: set[tuple[str, str]]) -> bool:
    field = broken.field or "<nil>"  # how the API server writes the path of the object itself
    return any(at == field and broken.message in message for at, message in seen)


def documents(file: Path, namespace: str) -> list[dict[str, Any]]:
    found = [document for document in yaml.safe_load_all(file.read_text()) if document is not None]
    return [each | {"metadata": each["metadata"] | {"namespace": namespace}} for each in found]


def contains(stored: Any, written: Any) -> bool:
    """Whether everything in `written` is in `stored`, which may hold more keys."""
    if isinstance(written, dict):
        return all(key in stored and contains(stored[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(stored) == len(written) and all(map(contains, stored, written))
    return bool(stored == written)


def rules(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """(field, message) of every CEL rule at and below `schema`."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule["message"]
    for name, below in schema.get("properties", {}).items():
        yield from rules(below, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from rules(schema["items"], f"{path}[]")


def schema_fields(schema: dict[str, Any], path: str) -> Iterator[str]:
    """The fields below `schema` that have no fields of their own."""
    if "properties" in schema:
        for name, below in schema["properties"].items():
            yield from schema_fields(below, f"{path}.{name}")
    elif "items" in schema:
        yield from schema_fields(schema["items"], f"{path}[]")
    else:
        yield path


def written_fields(value: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for name, below in value.items():
            yield from written_fields(below, f"{path}.{name}")
    elif isinstance(value, list):
        for below in value:
            yield from written_fields(below, f"{path}[]")


def test_the_crd_is_small_enough_for_kubectl_apply() -> None:
    assert len(json.dumps(CRD)) < MAX_CRD_BYTES


def test_the_crd_is_established_without_complaint(control_plane: ControlPlane) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD['metadata']['name']}"
    conditions = control_plane.request("get", path)["status"]["conditions"]
    assert {each["type"]: each["status"] for each in conditions} == {"NamesAccepted": "True", "Established": "True"}


def test_the_kind_has_its_short_name_and_category(control_plane: ControlPlane) -> None:
    resources = control_plane.request("get", "/apis/serving.kvasir.dev/v1alpha1")["resources"]
    [kind] = [each for each in resources if each["name"] == "inferenceservices"]
    assert kind["shortNames"] == ["kvsvc"]
    assert kind["namespaced"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_is_accepted_as_written(control_plane: ControlPlane, namespace: str, file: Path) -> None:
    for document in documents(file, namespace):
        assert contains(control_plane.apply(document)["spec"], document["spec"])


@pytest.mark.parametrize("file", FULL_MANIFESTS, ids=lambda file: file.name)
def test_a_full_manifest_is_accepted_as_written(control_plane: ControlPlane, namespace: str, file: Path) -> None:
    [document] = documents(file, namespace)
    assert contains(control_plane.apply(document)["spec"], document["spec"])


def test_the_full_manifests_use_every_field_of_the_schema() -> None:
    written = {
        field
        for file in FULL_MANIFESTS
        for document in documents(file, "default")
        for field in written_fields(document["spec"], "spec")
    }
    # The same schemas as spec.pod and the roles' own fields above them.
    copies = re.compile(
        r"spec\.disaggregation\.(prefill|decode)\.(?!engine)|spec\.disaggregation\.decode|spec\.router\.pod\."
    )
    missing = set(schema_fields(SCHEMA["properties"]["spec"], "spec")) - written
    assert not {field for field in missing if not copies.match(field)}


def test_every_default_is_filled_in(control_plane: ControlPlane, namespace: str) -> None:
    assert create(control_plane, manifest(namespace, {}))["spec"] == DEFAULT_SPEC


def test_autoscaling_is_filled_in_where_it_is_asked_for(control_plane: ControlPlane, namespace: str) -> None:
    stored = create(control_plane, manifest(namespace, {"autoscaling": {"maxReplicas": 4}}))
    assert stored["spec"]["autoscaling"] == DEFAULT_AUTOSCALING


@pytest.mark.parametrize(("field", "spec"), UNKNOWN_FIELDS, ids=[field for field, _ in UNKNOWN_FIELDS])
def test_an_unknown_field_is_refused(control_plane: ControlPlane, field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as refused:
        create(control_plane, manifest("default", spec), dryRun="All")
    assert f'unknown field "{field}"' in json.loads(refused.value.body or "")["message"]


@pytest.mark.parametrize("broken", CONTRADICTIONS, ids=lambda broken: f"{broken.field}: {broken.message[:40]}")
def test_a_contradiction_is_refused_with_what_to_write(control_plane: ControlPlane, broken: Broken) -> None:
    seen = refusals(control_plane, manifest("default", broken.spec, broken.name))
    assert is_refused_as(broken, seen), seen


@pytest.mark.parametrize("broken", CONTRADICTIONS, ids=lambda broken: f"{broken.field}: {broken.message[:40]}")
def test_the_operator_refuses_the_same_contradiction(broken: Broken) -> None:
    with pytest.raises(InvalidManifestError, match=re.escape(broken.message)):
        parse_service(manifest("default", broken.spec, broken.name))


@pytest.mark.parametrize(("spec", "name"), JUST_RIGHT.values(), ids=JUST_RIGHT)
def test_both_accept_what_just_holds(control_plane: ControlPlane, spec: dict[str, Any], name: str) -> None:
    stored = create(control_plane, manifest("default", spec, name), dryRun="All")
    assert parse_service(stored).spec == parse_service(manifest("default", spec, name)).spec


def test_every_rule_of_the_crd_is_broken_by_some_row() -> None:
    assert {(broken.field, broken.message) for broken in CONTRADICTIONS} == set(rules(SCHEMA))


@pytest.mark.parametrize("broken", WRONG_VALUES, ids=lambda broken: f"{broken.field}: {broken.message}")
def test_a_wrong_value_is_refused_by_field(control_plane: ControlPlane, broken: Broken) -> None:
    service = manifest("default", broken.spec)
    seen = refusals(control_plane, service)
    assert is_refused_as(broken, seen), seen
    with pytest.raises(InvalidManifestError):
        parse_service(service)


def test_scale_changes_the_replicas_and_names_the_pods(control_plane: ControlPlane, namespace: str) -> None:
    path = f"{collection(namespace)}/llama"
    create(control_plane, manifest(namespace, {"replicas": 1}))
    status = {"status": {"replicas": 1, "selector": "serving.kvasir.dev/service=llama"}}
    control_plane.request("patch", f"{path}/status", status, MERGE_PATCH)
    scale = control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 3}}, MERGE_PATCH)
    assert scale["status"] == {"replicas": 1, "selector": "serving.kvasir.dev/service=llama"}
    assert control_plane.request("get", path)["spec"]["replicas"] == 3


def test_scale_of_a_service_that_does_not_say_how_many_replicas_is_one(
    control_plane: ControlPlane, namespace: str
) -> None:
    path = f"{collection(namespace)}/llama"
    create(control_plane, manifest(namespace, {}))
    assert control_plane.request("get", f"{path}/scale")["spec"] == {"replicas": 1}
    control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 0}}, MERGE_PATCH)
    assert control_plane.request("get", path)["spec"]["replicas"] == 0


def test_scale_of_an_autoscaled_service_is_read_and_refused_to_be_set(
    control_plane: ControlPlane, namespace: str
) -> None:
    path = f"{collection(namespace)}/llama"
    create(control_plane, manifest(namespace, {"autoscaling": {"maxReplicas": 4}}))
    assert control_plane.request("get", f"{path}/scale")["spec"] == {"replicas": 1}
    with pytest.raises(UnprocessibleEntityError, match="an autoscaled role owns its own replica count"):
        control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 3}}, MERGE_PATCH)


AUTOSCALED = {"autoscaling": {"maxReplicas": 4}}
# What some manager has set, and what another one writes who knows nothing of that.
LEFTOVERS = {
    "autoscaling": ({"replicas": 3}, AUTOSCALED),
    "autoscaling of one at zero": ({"replicas": 0}, AUTOSCALED),
    "disaggregation": ({"replicas": 3}, disaggregated({}, {})),
    "autoscaling of a role": (disaggregated({"replicas": 2}, {}), disaggregated(AUTOSCALED, {})),
}


@pytest.mark.parametrize(("left", "wanted"), LEFTOVERS.values(), ids=LEFTOVERS)
def test_replicas_that_somebody_else_has_set_stand_and_do_not_count(
    control_plane: ControlPlane, namespace: str, left: dict[str, Any], wanted: dict[str, Any]
) -> None:
    control_plane.apply(manifest(namespace, left), "gitops")
    stored = control_plane.apply(manifest(namespace, wanted), "platform")
    assert contains(stored["spec"], left)
    assert parse_service(stored).spec == parse_service(manifest(namespace, wanted)).spec
    stored = control_plane.apply(manifest(namespace, left), "gitops")
    status = {"status": {"phase": "Ready"}}
    control_plane.request("patch", f"{collection(namespace)}/llama/status", status, MERGE_PATCH)
    assert contains(stored["spec"], wanted)


def test_a_scaled_service_can_be_autoscaled_and_then_no_longer_scaled(
    control_plane: ControlPlane, namespace: str
) -> None:
    path = f"{collection(namespace)}/llama"
    create(control_plane, manifest(namespace, {}))
    control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 3}}, MERGE_PATCH)
    control_plane.request("patch", path, {"spec": AUTOSCALED}, MERGE_PATCH)
    with pytest.raises(UnprocessibleEntityError, match="an autoscaled role owns its own replica count"):
        control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 2}}, MERGE_PATCH)
    control_plane.request("patch", f"{path}/scale", {"spec": {"replicas": 1}}, MERGE_PATCH)


def test_nulls_of_a_security_context_are_stored_and_parsed(control_plane: ControlPlane, namespace: str) -> None:
    written = {"runAsUser": None, "seccompProfile": {"type": None}}
    created = create(control_plane, manifest(namespace, {"pod": {"securityContext": written}}))
    applied = control_plane.apply(manifest(namespace, {"router": {"pod": {"securityContext": written}}}, "other"))
    assert parse_service(created).spec.pod.security_context == written
    assert parse_service(applied).spec.router.pod.security_context == written


def test_printer_columns_show_the_status(control_plane: ControlPlane, namespace: str) -> None:
    create(control_plane, manifest(namespace, {}))
    status = {"phase": "Ready", "ready": "2/2", "replicas": 2, "url": "http://llama-router:8080/v1"}
    status |= {"conditions": [condition("Ready", "True")]}
    control_plane.request("patch", f"{collection(namespace)}/llama/status", {"status": status}, MERGE_PATCH)
    answer = control_plane.dynamic.request(
        "get", collection(namespace), header_params={"Accept": TABLE}, serialize=False
    )
    table = json.loads(answer.data)
    columns = [column["name"] for column in table["columnDefinitions"]]
    assert columns == ["Name", "Ready", "Phase", "Reason", "URL", "Age", "Source", "Message"]
    cells = dict(zip(columns, table["rows"][0]["cells"], strict=True))
    assert [cells[column] for column in columns if column != "Age"] == [
        *("llama", "2/2", "Ready", "Serving", status["url"], "hf://org/name"),
        "2 of 2",
    ]


def condition(kind: str, status: str) -> dict[str, str]:
    fields = {"reason": "Serving", "message": "2 of 2", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    return {"type": kind, "status": status, **fields}


def test_status_is_written_apart_from_the_spec(control_plane: ControlPlane, namespace: str) -> None:
    path = f"{collection(namespace)}/llama"
    created = create(control_plane, manifest(namespace, {"replicas": 1}) | {"status": {"phase": "Ready"}})
    assert "status" not in created
    both = {"spec": {"replicas": 5}, "status": {"phase": "Loading"}}
    stored = control_plane.request("patch", f"{path}/status", both, MERGE_PATCH)
    assert (stored["status"], stored["spec"]["replicas"]) == ({"phase": "Loading"}, 1)
    assert stored["metadata"]["generation"] == 1
