"""What a service and its children should look like once everything is at rest, by the operator's own pure functions.

A revision's name stands for the operator's settings too, which only the operator knows. So it is taken from the status,
and the workloads of that name must hold what the spec asks for. Groups are StatefulSets.
"""

import time
from collections.abc import Iterator

from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, revision_of
from tests.controlplane.processes import wait_until

from kvasir_operator.api.labels import ENGINE_ROLES, SERVICE_LABEL, workload_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_service
from kvasir_operator.desired.roles import EngineRole, engine_roles, router_roles
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.settings import OperatorSettings

WORKLOAD_KINDS = "deployments,statefulsets"
CHILD_KINDS = (
    f"{WORKLOAD_KINDS},services,serviceaccounts,poddisruptionbudgets,networkpolicies,roles,rolebindings,secrets"
)
CONVERGED_WITHIN_SECONDS = 180.0


def seconds_to_converge(service: LiveService) -> float:
    """Until nothing differs any more from what the spec says; raises TimeoutError with what still does."""
    started = time.monotonic()
    try:
        wait_until(lambda: not differences(service), CONVERGED_WITHIN_SECONDS, "the final state", POLL_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {differences(service)}") from error
    return time.monotonic() - started


def differences(service: LiveService) -> list[str]:
    """Between what is there and what the spec says; empty when the service is at rest."""
    obj = service.cluster.get("inferenceservice", service.name, service.namespace)
    assert obj is not None
    wanted, revision = parse_service(obj), _revision_of_status(obj)
    engines = engine_roles(wanted, OperatorSettings().defaults)
    workloads = {engine.name: service.children(WORKLOAD_KINDS, engine.name) for engine in engines}
    return [
        *_status(obj),
        *(each for engine in engines for each in _workloads(wanted, engine, revision, workloads[engine.name])),
        *(each for engine in engines for each in _pods(service, engine, revision)),
        *_router_pods(service, wanted),
        *_children(service, wanted, revision, [each for found in workloads.values() for each in found]),
    ]


def _revision_of_status(obj: KubeObject) -> str:
    """That of all engine roles; empty while there is none."""
    roles = obj.get("status", {}).get("roles", [])
    found = {role.get("revision", "") for role in roles if role["role"] in ENGINE_ROLES}
    return str(found.pop()) if len(found) == 1 else ""


def _status(obj: KubeObject) -> Iterator[str]:
    status, generation = obj.get("status", {}), obj["metadata"]["generation"]
    if status.get("observedGeneration") != generation:
        yield f"observedGeneration is {status.get('observedGeneration')}, not {generation}"
    holds = {each["type"]: each["status"] for each in status.get("conditions", [])}
    if (holds.get("Ready"), holds.get("Progressing"), holds.get("Degraded")) != ("True", "False", "False"):
        yield f"conditions are {holds}"


def _workloads(
    wanted: InferenceService, engine: EngineRole, revision: str, workloads: list[KubeObject]
) -> Iterator[str]:
    """Those of the status' revision are the spec's, and no other has replicas."""
    current = [each for each in workloads if revision_of(each) == revision]
    if len(current) != (engine.replicas if engine.is_grouped else 1):
        yield f"{engine.name} has of revision {revision!r} {len(current)} among {sorted(map(_name, workloads))}"
    expected = _asked_for(engine_pod_template(wanted, engine, OperatorSettings()))
    for each in current:
        if (found := _asked_for(each["spec"]["template"])) != expected:
            yield f"{_name(each)} holds {found}, not {expected}"
    former = [each for each in workloads if revision_of(each) != revision]
    num_former = len(set(map(revision_of, former)))
    if any(each["spec"]["replicas"] for each in former) or num_former > wanted.spec.rollout.history_limit:
        yield f"replicas of former revisions are { {_name(each): each['spec']['replicas'] for each in former} }"


def _asked_for(template: KubeObject) -> dict[str, object]:
    """What of a pod is the spec's alone, whatever the operator's settings."""
    [container] = template["spec"]["containers"]
    names = ("serviceAccountName", "terminationGracePeriodSeconds")
    return {"command": container["command"]} | {name: template["spec"][name] for name in names}


def _pods(service: LiveService, engine: EngineRole, revision: str) -> Iterator[str]:
    yield from _num_pods(service, engine.name, engine.replicas * engine.num_nodes)
    revisions = {revision_of(pod) for pod in service.pods(engine.name)}
    if revisions != {revision}:
        yield f"revisions of the pods of {engine.name} are {revisions}, not {revision}"


def _router_pods(service: LiveService, wanted: InferenceService) -> Iterator[str]:
    for router in router_roles(wanted, OperatorSettings().defaults):
        yield from _num_pods(service, router.name, router.replicas)


def _num_pods(service: LiveService, role: str, number: int) -> Iterator[str]:
    """Every pod counts, also one that is on its way out."""
    pods = service.pods(role)
    if (len(pods), sum(map(is_pod_ready, pods))) != (number, number):
        yield f"{role} has {len(pods)} pods, {sum(map(is_pod_ready, pods))} of them ready, not {number}"


def _children(
    service: LiveService, wanted: InferenceService, revision: str, workloads: list[KubeObject]
) -> Iterator[str]:
    """Workloads are counted elsewhere."""
    found = service.cluster.list(CHILD_KINDS, service.namespace, f"{SERVICE_LABEL}={service.name}")
    names = {_name(obj) for obj in found} - set(map(_name, workloads))
    desired = desired_service(wanted, OperatorSettings())
    expected = {_name(obj) for obj in desired.shared}
    expected |= {f"Service {workload_name(service.name, engine.name, revision)}" for engine in desired.roles}
    if names != expected:
        yield f"left over: {sorted(names - expected)}, missing: {sorted(expected - names)}"


def _name(obj: KubeObject) -> str:
    return f"{obj['kind']} {obj['metadata']['name']}"
