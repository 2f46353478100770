"""What a service and its children should look like once everything is at rest, by the operator's own pure functions.

A revision's name stands for the operator's settings too, which only the operator knows. So it is taken from the status,
and the workload of that name must hold what the spec asks for.
"""

from collections.abc import Iterator

from e2e.live_cluster import KubeObject, LiveService, is_pod_ready, revision_of

from kvasir_operator.api.labels import ROLE_SERVE, SERVICE_LABEL, workload_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_service
from kvasir_operator.desired.roles import Role, engine_roles, router_roles
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings

CHILD_KINDS = "deployments,services,serviceaccounts,poddisruptionbudgets,networkpolicies,roles,rolebindings,secrets"


def differences(service: LiveService) -> list[str]:
    """Between what is there and what the spec says; empty when the service is at rest."""
    obj = service.cluster.get("inferenceservice", service.name, service.namespace)
    assert obj is not None
    wanted, revision = parse_service(obj), _revision_of_status(obj)
    return [
        *_status(obj),
        *_workload(service, wanted, revision),
        *_pods(service, wanted, revision),
        *_children(service, wanted, revision),
    ]


def _revision_of_status(obj: KubeObject) -> str:
    """Empty while there is none."""
    found = {role["role"]: role.get("revision", "") for role in obj.get("status", {}).get("roles", [])}
    return str(found.get(ROLE_SERVE, ""))


def _status(obj: KubeObject) -> Iterator[str]:
    status, generation = obj.get("status", {}), obj["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        yield f"observedGeneration is {status.get('observedGeneration')}, not {generation}"
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if (holds.get("Ready"), holds.get("Progressing"), holds.get("Degraded")) != ("True", "False", "False"):
        yield f"conditions are {holds}"


def _workload(service: LiveService, wanted: InferenceService, revision: str) -> Iterator[str]:
    """The revision of the status is the spec's, and no other has replicas."""
    workloads = service.revisions()
    if revision not in workloads:
        yield f"the status names revision {revision!r}, and there are {sorted(workloads)}"
        return
    [engine] = engine_roles(wanted, OperatorSettings().defaults)
    expected = _asked_for(engine_pod_template(wanted, engine, OperatorSettings()))
    found = _asked_for(workloads[revision]["spec"]["template"])
    if found != expected:
        yield f"revision {revision} holds {found}, not {expected}"
    others = {name: each["spec"]["replicas"] for name, each in workloads.items() if name != revision}
    if any(others.values()) or len(others) > wanted.spec.rollout.history_limit:
        yield f"replicas of former revisions are {others}"


def _asked_for(template: KubeObject) -> dict[str, object]:
    """What of a pod is the spec's alone, whatever the operator's settings."""
    [container] = template["spec"]["containers"]
    names = ("serviceAccountName", "terminationGracePeriodSeconds")
    return {"command": container["command"]} | {name: template["spec"][name] for name in names}


def _pods(service: LiveService, wanted: InferenceService, revision: str) -> Iterator[str]:
    """Every pod counts, also one that is on its way out."""
    defaults = OperatorSettings().defaults
    roles: list[Role] = [*engine_roles(wanted, defaults), *router_roles(wanted, defaults)]
    for role in roles:
        pods = service.pods(role.name)
        if (len(pods), sum(map(is_pod_ready, pods))) != (role.replicas, role.replicas):
            yield f"{role.name} has {len(pods)} pods, {sum(map(is_pod_ready, pods))} of them ready, not {role.replicas}"
    revisions = {revision_of(pod) for pod in service.pods(ROLE_SERVE)}
    if revisions != {revision}:
        yield f"revisions of the pods are {revisions}, not {revision}"


def _children(service: LiveService, wanted: InferenceService, revision: str) -> Iterator[str]:
    found = service.cluster.list(CHILD_KINDS, service.namespace, f"{SERVICE_LABEL}={service.name}")
    kept = {_name(workload) for other, workload in service.revisions().items() if other != revision}
    names = {_name(obj) for obj in found} - kept
    own = workload_name(service.name, ROLE_SERVE, revision)
    expected = {_name(obj) for obj in desired_service(wanted, OperatorSettings()).shared}
    expected |= {f"Deployment {own}", f"Service {own}"}
    if names != expected:
        yield f"left over: {sorted(names - expected)}, missing: {sorted(expected - names)}"


def _name(obj: KubeObject) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"
