"""A service of prefill and decode pods on a real API server: made, served by decode alone, updated, scaled."""

from contextlib import suppress
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL
from kvasir_operator.kube.kinds import DEPLOYMENT, KubeObject
from kvasir_operator.observe.waiting import is_ready

from .control_plane import ControlPlane
from .fake_node import NODE, bind_pod, list_pods, report_ready
from .processes import wait_until
from .reconciling import NAME, conditions, get_children, get_service, manifest, run_pass

RESOURCES = {"cpu": "1", "memory": "2048Mi"}
ROLES = ("prefill", "decode")


def split(namespace: str, num_prefill: int = 1, num_decode: int = 2, **spec: Any) -> KubeObject:
    roles = {
        role: {"replicas": number, "resources": RESOURCES}
        for role, number in zip(ROLES, (num_prefill, num_decode), strict=True)
    }
    obj = manifest(namespace, disaggregation=roles, **spec)
    for moved in ("replicas", "resources"):
        del obj["spec"][moved]
    return obj


def pods_of(control_plane: ControlPlane, namespace: str, *roles: str) -> list[KubeObject]:
    """Those that are not being deleted."""
    selector = f"{SERVICE_LABEL}={NAME},{ROLE_LABEL} in ({','.join(roles)})"
    return [pod for pod in list_pods(control_plane, namespace, selector) if "deletionTimestamp" not in pod["metadata"]]


def mark_ready(control_plane: ControlPlane, namespace: str, *roles: str) -> None:
    for pod in pods_of(control_plane, namespace, *roles):
        if not is_ready(pod):
            with suppress(NotFoundError):  # it went after it was listed
                bind_pod(control_plane, pod, NODE)
                report_ready(control_plane, pod)


def settle(control_plane: ControlPlane, namespace: str, *roles: str) -> None:
    """Report these roles' pods ready, and run passes, until all that are asked for are there and nothing is written."""

    def is_settled() -> bool:
        mark_ready(control_plane, namespace, *roles)
        is_quiet = not run_pass(control_plane, namespace).writes
        found = get_children(control_plane, namespace).items()
        wanted = [each["spec"]["replicas"] for key, each in found if key.kind == DEPLOYMENT]
        pods = pods_of(control_plane, namespace, *ROLES, "router")
        return is_quiet and len(pods) == sum(wanted) and all(map(is_ready, pods_of(control_plane, namespace, *roles)))

    wait_until(is_settled, 60, "the service to settle")


def test_decode_alone_serves_and_prefill_is_missed(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(split(namespace))
    settle(control_plane, namespace, "decode", "router")
    found = get_service(control_plane, namespace)
    assert conditions(found)["Ready"] == ("True", "Serving")
    assert conditions(found)["Degraded"] == ("True", "NoReadyPrefill")
    settle(control_plane, namespace, *ROLES, "router")
    found = get_service(control_plane, namespace)
    assert conditions(found)["Degraded"] == ("False", "AsExpected")
    roles = {each["role"]: (each["desired"], each["ready"]) for each in found["status"]["roles"]}
    assert roles == {"prefill": (1, 1), "decode": (2, 2), "router": (2, 2)}
    assert (found["status"]["phase"], found["status"]["ready"]) == ("Ready", "3/3")


def test_both_roles_roll_out_together_and_each_keeps_its_number(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(split(namespace))
    settle(control_plane, namespace, *ROLES)
    old = {pod["metadata"]["uid"] for pod in pods_of(control_plane, namespace, *ROLES)}
    control_plane.apply(split(namespace, engine={"device": "cpu", "maxNumSeqs": 8}))

    def is_done() -> bool:
        mark_ready(control_plane, namespace, *ROLES)
        for role, least in (("prefill", 1), ("decode", 2)):
            assert sum(map(is_ready, pods_of(control_plane, namespace, role))) >= least, role
        run_pass(control_plane, namespace)
        return not old & {pod["metadata"]["uid"] for pod in pods_of(control_plane, namespace, *ROLES)}

    wait_until(is_done, 60, "the rollout to end")
    settle(control_plane, namespace, *ROLES)
    revisions = {pod["metadata"]["labels"][REVISION_LABEL] for pod in pods_of(control_plane, namespace, *ROLES)}
    assert len(revisions) == 1


def test_each_role_scales_by_itself_and_keeps_its_revision(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(split(namespace))
    settle(control_plane, namespace, *ROLES)
    [prefill] = pods_of(control_plane, namespace, "prefill")
    control_plane.apply(split(namespace, num_decode=1))
    settle(control_plane, namespace, *ROLES)
    [decode] = pods_of(control_plane, namespace, "decode")
    assert pods_of(control_plane, namespace, "prefill")[0]["metadata"]["uid"] == prefill["metadata"]["uid"]
    assert decode["metadata"]["labels"][REVISION_LABEL] == prefill["metadata"]["labels"][REVISION_LABEL]
