"""A service of prefill and decode pods on a real API server: made, served by decode alone, updated, scaled."""

from collections import Counter
from contextlib import suppress
from typing import Any

from kubernetes.dynamic.exceptions import NotFoundError

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL
from kvasir_operator.kube.kinds import DEPLOYMENT, KubeObject
from kvasir_operator.observe.waiting import is_ready

from .control_plane import ControlPlane
from .fake_node import NODE, bind_pod, list_pods, report_ready
from .placements import placed
from .processes import wait_until
from .reconciling import (
    NAME,
    conditions,
    current_revision,
    get_children,
    get_service,
    manifest,
    revision_of_pod,
    run_pass,
)

RESOURCES = {"cpu": "1", "memory": "2048Mi"}
NEW = {"device": "cpu", "maxNumSeqs": 8}
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
    control_plane.apply(split(namespace, engine=NEW))

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


def ready_pods(control_plane: ControlPlane, namespace: str) -> Counter[tuple[str, str]]:
    """By role and revision."""
    pods = filter(is_ready, pods_of(control_plane, namespace, *ROLES))
    return Counter((pod["metadata"]["labels"][ROLE_LABEL], revision_of_pod(pod)) for pod in pods)


def roll_to(control_plane: ControlPlane, namespace: str, pods: dict[tuple[str, str], int], **spec: Any) -> None:
    """Until so many pods by role and revision are ready and a pass writes nothing; one of each role is at any time."""
    control_plane.apply(split(namespace, **spec))

    def is_there() -> bool:
        mark_ready(control_plane, namespace, *ROLES)
        assert {role for role, _ in ready_pods(control_plane, namespace)} == set(ROLES)
        run_pass(control_plane, namespace)
        return ready_pods(control_plane, namespace) == Counter(pods)

    wait_until(is_there, 60, f"ready pods: {pods}")
    settle(control_plane, namespace, *ROLES)
    assert ready_pods(control_plane, namespace) == Counter(pods)


def test_a_canary_has_both_roles_with_its_weight_until_it_is_taken_back_or_let_go_on(
    control_plane: ControlPlane, namespace: str
) -> None:
    def wait_placed(expected: dict[str, int]) -> None:
        of_pairs = {(revision, revision): number for revision, number in expected.items()}
        wait_until(lambda: placed(control_plane, namespace, 20) == of_pairs, 30, f"{expected} of 20 requests")

    control_plane.apply(split(namespace))
    settle(control_plane, namespace, *ROLES)
    old = current_revision(control_plane, namespace)
    all_old = {("prefill", old): 1, ("decode", old): 2}
    held, let_go = ({"rollout": {"canary": {"weight": 25, "pause": pause}}} for pause in (True, False))
    control_plane.apply(split(namespace, engine=NEW, **held))
    new = current_revision(control_plane, namespace)
    beside = all_old | {("prefill", new): 1, ("decode", new): 1}
    roll_to(control_plane, namespace, beside, engine=NEW, **held)
    assert conditions(get_service(control_plane, namespace))["Progressing"] == ("False", "RolloutPaused")
    wait_placed({old: 15, new: 5})
    roll_to(control_plane, namespace, all_old)
    wait_placed({old: 20})
    roll_to(control_plane, namespace, beside, engine=NEW, **held)
    wait_placed({old: 15, new: 5})
    roll_to(control_plane, namespace, {("prefill", new): 1, ("decode", new): 2}, engine=NEW, **let_go)
    wait_placed({new: 20})
    roll_to(control_plane, namespace, all_old)
    wait_placed({old: 20})
