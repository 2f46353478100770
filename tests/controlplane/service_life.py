"""What a service may live through, so that its operator does all that it ever does."""

from functools import partial

from kvasir_operator.api import labels
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, LEASE, LISTED_CHILD_KINDS, OPTIONAL_KINDS, KubeObject
from kvasir_operator.kube.leadership import OWN_LEASE

from .control_plane import ControlPlane
from .fake_answers import engine_at_work
from .fake_node import MERGE_PATCH, list_pods, move, report_failed
from .leader_worker_controller import look_after_sets
from .processes import wait_until
from .reconciling import NAME, manifest, path_of
from .rights import used

STRAY = "stray"
GROUPED = "staged"
SECONDS = 120.0
"""A bound for a crowded machine."""


def live_through(cluster: ControlPlane, user: str, namespace: str, lease_namespace: str) -> None:
    """A service is made, has trouble, is ready, shrinks and goes; a group fails; unwanted children go, and the Lease is
    lost."""
    cluster.apply(manifest(namespace))
    pods = [labels.selector_text(labels.role_selector(NAME, role)) for role in (labels.ROLE_SERVE, labels.ROLE_ROUTER)]
    for selector in pods:
        cluster.wait_for_pods(namespace, selector, 2)
    cluster.mark_pods_waiting(namespace, pods[0], "ContainerCreating", "", 2)
    wait_until(lambda: ("", "events", "list") in used(cluster, user), SECONDS, "the pods' Events to be asked for")
    report_trouble(cluster, namespace, pods[0])
    for round_ in ("first", "second"):  # the Event of a fact that is known already is counted up
        for selector in pods:
            cluster.mark_pods_ready(namespace, selector, 2)
        wait_until(lambda: is_ready(cluster, namespace), SECONDS, f"the service to be ready the {round_} time")
        if round_ == "first":
            report_trouble(cluster, namespace, pods[0])
    restart_a_group(cluster, namespace)
    remove_strays(cluster, namespace)
    with engine_at_work() as address:  # which the operator asks how busy it is before it lets one go
        for pod in running(cluster, namespace, pods[0]):
            move(cluster, pod, address)
        cluster.request("patch", path_of(INFERENCE_SERVICE, namespace, NAME), {"spec": {"replicas": 1}}, MERGE_PATCH)
        wait_until(lambda: len(running(cluster, namespace, pods[0])) == 1, SECONDS, "the service to shrink")
    cluster.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
    cluster.request("delete", path_of(LEASE, lease_namespace, OWN_LEASE))
    wait_until(lambda: cluster.exists(path_of(LEASE, lease_namespace, OWN_LEASE)), SECONDS, "the Lease to be back")


def report_trouble(cluster: ControlPlane, namespace: str, selector: str) -> None:
    cluster.mark_pods_waiting(namespace, selector, "ImagePullBackOff", "there is no such image", 2)
    wait_until(lambda: not is_ready(cluster, namespace), SECONDS, "the service not to be ready")


def is_ready(cluster: ControlPlane, namespace: str) -> bool:
    status = cluster.request("get", path_of(INFERENCE_SERVICE, namespace, NAME)).get("status", {})
    return any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", []))


def running(cluster: ControlPlane, namespace: str, selector: str) -> list[KubeObject]:
    return [pod for pod in list_pods(cluster, namespace, selector) if "deletionTimestamp" not in pod["metadata"]]


def restart_a_group(cluster: ControlPlane, namespace: str) -> None:
    cluster.apply(manifest(namespace, GROUPED, replicas=1, parallelism={"pipeline": 2}))
    selector = labels.selector_text(labels.role_selector(GROUPED, labels.ROLE_SERVE))
    before = wait_until(lambda: pods_of_groups(cluster, namespace, selector), SECONDS, "the pods of a group")
    cluster.mark_pods_ready(namespace, selector, 2)
    report_failed(cluster, before[0], "error: a rank is lost")
    old = {pod["metadata"]["uid"] for pod in before}

    def is_new() -> bool:
        now = pods_of_groups(cluster, namespace, selector) or []
        return len(now) == 2 and not old & {pod["metadata"]["uid"] for pod in now}

    wait_until(is_new, SECONDS, "the group to be made anew")


def pods_of_groups(cluster: ControlPlane, namespace: str, selector: str) -> list[KubeObject] | None:
    """After a look of the controller of LeaderWorkerSets, where there are any; None while there are not two."""
    look_after_sets(cluster, namespace)
    pods = running(cluster, namespace, selector)
    return pods if len(pods) >= 2 else None


def remove_strays(cluster: ControlPlane, namespace: str) -> None:
    """One child of each kind that the manifest does not ask for, as an earlier release may have left it."""
    for kind in LISTED_CHILD_KINDS:
        if kind in OPTIONAL_KINDS and not cluster.exists(path_of(kind, namespace)):
            continue
        own = cluster.request("get", path_of(kind, namespace), labelSelector=labels.SERVICE_LABEL)["items"]
        assert own, f"no {kind.kind} is made, so no right on it is needed"
        cluster.request("post", path_of(kind, namespace), {**stray_of(own[0]), "kind": kind.kind})
        gone = partial(cluster.exists, path_of(kind, namespace, STRAY))
        wait_until(lambda gone=gone: not gone(), SECONDS, f"the stray {kind.kind} to be deleted")  # type: ignore[misc]


def stray_of(child: KubeObject) -> KubeObject:
    kept = {key: child["metadata"][key] for key in ("namespace", "labels", "ownerReferences")}
    spec = {key: value for key, value in child.get("spec", {}).items() if key not in ("clusterIP", "clusterIPs")}
    content = {key: value for key, value in child.items() if key not in ("metadata", "spec", "status")}
    return {**content, "metadata": {**kept, "name": STRAY}} | ({"spec": spec} if spec else {})
