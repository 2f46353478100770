"""What a service and its children should look like once everything is at rest, by the operator's own pure functions."""

from collections.abc import Iterator

from e2e.live_cluster import KubeObject, LiveService, is_pod_ready

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_ROUTER, ROLE_SERVE, SERVICE_LABEL
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired import desired_objects, revision_of
from kvasir_operator.resources.replicas import engine_replicas, router_replicas
from kvasir_operator.settings import OperatorSettings

CHILD_KINDS = "deployments,services,serviceaccounts,poddisruptionbudgets,roles,rolebindings,secrets"


def differences(service: LiveService) -> list[str]:
    """Between what is there and what the spec says; empty when the service is at rest."""
    obj = service.cluster.get("inferenceservice", service.name, service.namespace)
    assert obj is not None
    wanted = parse_service(obj)
    return [*_status(obj, wanted), *_pods(service, wanted), *_children(service, wanted)]


def _status(obj: KubeObject, wanted: InferenceService) -> Iterator[str]:
    status, generation = obj.get("status", {}), obj["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        yield f"observedGeneration is {status.get('observedGeneration')}, not {generation}"
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if (holds.get("Ready"), holds.get("Progressing"), holds.get("Degraded")) != ("True", "False", "False"):
        yield f"conditions are {holds}"
    revisions = {role["role"]: role.get("revision") for role in status.get("roles", [])}
    if revisions.get(ROLE_SERVE) != revision_of(wanted):
        yield f"revision of the status is {revisions.get(ROLE_SERVE)}, not {revision_of(wanted)}"


def _pods(service: LiveService, wanted: InferenceService) -> Iterator[str]:
    """Every pod counts, also one that is on its way out."""
    for role, number in ((ROLE_SERVE, engine_replicas(wanted)), (ROLE_ROUTER, router_replicas(wanted))):
        pods = service.pods(role)
        if (len(pods), sum(map(is_pod_ready, pods))) != (number, number):
            yield f"{role} has {len(pods)} pods, {sum(map(is_pod_ready, pods))} of them ready, not {number}"
    revisions = {pod["metadata"]["labels"][REVISION_LABEL] for pod in service.pods(ROLE_SERVE)}
    if revisions != {revision_of(wanted)}:
        yield f"revisions of the pods are {revisions}, not {revision_of(wanted)}"


def _children(service: LiveService, wanted: InferenceService) -> Iterator[str]:
    found = service.cluster.list(CHILD_KINDS, service.namespace, f"{SERVICE_LABEL}={service.name}")
    names = {_name(obj) for obj in found}
    expected = {_name(obj) for obj in desired_objects(wanted, OperatorSettings())}
    if names != expected:
        yield f"left over: {sorted(names - expected)}, missing: {sorted(expected - names)}"


def _name(obj: KubeObject) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"
