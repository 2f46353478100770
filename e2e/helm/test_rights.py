"""The installed ServiceAccount may do what the operator asks for, and nothing else.

Neither side is a list that somebody wrote: what is granted is asked of the API server, verb by verb; what is used is
read from its audit log, after the operator has lived through a service's life.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from e2e.helm.helm import Helm
from e2e.helm.installed import OPERATOR, running_installed
from kubernetes.dynamic.exceptions import NotFoundError
from tests.charts.chart_rules import Permission, permissions, rules_of
from tests.controlplane.control_plane import ControlPlane
from tests.controlplane.fake_node import list_pods, report_failed
from tests.controlplane.processes import wait_until
from tests.controlplane.programs import unused_loopback_address
from tests.controlplane.reconciling import NAME, manifest, path_of

from kvasir_operator.api import labels
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, LEASE, LISTED_CHILD_KINDS, KubeObject
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE

MERGE_PATCH = "application/merge-patch+json"
STRAY = "stray"
GROUPED = "staged"
CREATED = 201
# Checked when a child names its service as an owner, where the cluster does so (OpenShift); never asked for by itself.
NEVER_ASKED = {("serving.kvasir.dev", "inferenceservices/finalizers", "update")}
OF_LEASES = permissions(rules_of("kvasir.leaseRules"))
USERS = {
    "view": {"get", "list", "watch"},
    "edit": {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"},
}


def known_permissions(cluster: ControlPlane) -> set[Permission]:
    """Every verb of every resource that the API server has, subresources included."""
    return wait_until(partial(discovered_permissions, cluster), 30, "every API group to be served")


def discovered_permissions(cluster: ControlPlane) -> set[Permission] | None:
    """None while a group is listed that is not served yet, or no longer: its CRD came or went just now."""
    groups = [group["preferredVersion"]["groupVersion"] for group in cluster.request("get", "/apis")["groups"]]
    try:
        lists = [cluster.request("get", f"/apis/{group}") for group in groups] + [cluster.request("get", "/api/v1")]
    except NotFoundError:
        return None
    return {
        (each["groupVersion"].rpartition("/")[0], resource["name"], verb)
        for each in lists
        for resource in each["resources"]
        for verb in resource["verbs"]
    }


def is_allowed(cluster: ControlPlane, user: str, permission: Permission, namespace: str, name: str = OWN_LEASE) -> bool:
    """`name` is that of the object; a rule that names no objects allows any."""
    group, resource, verb = permission
    resource, _, subresource = resource.partition("/")
    about = {"group": group, "resource": resource, "subresource": subresource, "name": name}
    spec = {"user": user, "resourceAttributes": {**about, "verb": verb, "namespace": namespace}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = cluster.request("post", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def account(namespace: str, name: str = OPERATOR) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def granted(cluster: ControlPlane, user: str, namespace: str) -> set[Permission]:
    """What a ServiceAccount may do in a namespace, by its own bindings alone."""
    asked = known_permissions(cluster) | NEVER_ASKED
    return {each for each in asked if is_allowed(cluster, user, each, namespace)}


def requests_of(cluster: ControlPlane, user: str) -> list[KubeObject]:
    """The API server's answers to a user about objects, by its audit log."""
    events = [json.loads(line) for line in (cluster.directory / "audit.log").read_text().splitlines()]
    return [event for event in events if event["user"]["username"] == user and "resource" in event.get("objectRef", {})]


def used(cluster: ControlPlane, user: str) -> set[Permission]:
    """What a user's requests needed. A server-side apply that made the object needed the right to create it too."""
    needed = set()
    for event in requests_of(cluster, user):
        about = event["objectRef"]
        resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
        needed.add((about.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == CREATED:
            needed.add((about.get("apiGroup", ""), resource, "create"))
    return needed


def live_through(cluster: ControlPlane, user: str, namespace: str, lease_namespace: str) -> None:
    """A service is made, has trouble, is ready, shrinks; a group fails; unwanted children go, and the Lease is lost."""
    cluster.apply(manifest(namespace))
    pods = [labels.selector_text(labels.role_selector(NAME, role)) for role in (labels.ROLE_SERVE, labels.ROLE_ROUTER)]
    for selector in pods:
        cluster.wait_for_pods(namespace, selector, 2)
    cluster.mark_pods_waiting(namespace, pods[0], "ContainerCreating", "", 2)
    wait_until(lambda: ("", "events", "list") in used(cluster, user), 30, "the pods' Events to be asked for")
    report_trouble(cluster, namespace, pods[0])
    for round_ in ("first", "second"):  # the Event of a fact that is known already is counted up
        for selector in pods:
            cluster.mark_pods_ready(namespace, selector, 2)
        wait_until(lambda: is_ready(cluster, namespace), 30, f"the service to be ready the {round_} time")
        if round_ == "first":
            report_trouble(cluster, namespace, pods[0])
    restart_a_group(cluster, namespace)
    remove_strays(cluster, namespace)
    with telling_load() as host:
        for pod in running(cluster, namespace, pods[0]):
            path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}/status"
            cluster.request("patch", path, {"status": {"podIP": host, "podIPs": [{"ip": host}]}}, MERGE_PATCH)
        cluster.request("patch", path_of(INFERENCE_SERVICE, namespace, NAME), {"spec": {"replicas": 1}}, MERGE_PATCH)
        wait_until(lambda: len(running(cluster, namespace, pods[0])) == 1, 60, "the service to shrink")
    cluster.request("delete", path_of(LEASE, lease_namespace, OWN_LEASE))
    wait_until(lambda: cluster.exists(path_of(LEASE, lease_namespace, OWN_LEASE)), 20, "the Lease to be back")


@contextmanager
def telling_load() -> Iterator[str]:
    """Stands for engines that say how busy they are, which the operator asks before it lets one go; yields its host."""

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"server_load": 3}')

        def log_message(self, *_: object) -> None:
            """Silent."""

    host = unused_loopback_address()
    with ThreadingHTTPServer((host, labels.ENGINE_HTTP_PORT), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield host
        server.shutdown()


def report_trouble(cluster: ControlPlane, namespace: str, selector: str) -> None:
    cluster.mark_pods_waiting(namespace, selector, "ImagePullBackOff", "there is no such image", 2)
    wait_until(lambda: not is_ready(cluster, namespace), 30, "the service not to be ready")


def is_ready(cluster: ControlPlane, namespace: str) -> bool:
    status = cluster.request("get", path_of(INFERENCE_SERVICE, namespace, NAME)).get("status", {})
    return any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions", []))


def running(cluster: ControlPlane, namespace: str, selector: str) -> list[KubeObject]:
    return [pod for pod in list_pods(cluster, namespace, selector) if "deletionTimestamp" not in pod["metadata"]]


def restart_a_group(cluster: ControlPlane, namespace: str) -> None:
    cluster.apply(manifest(namespace, GROUPED, replicas=1, parallelism={"pipeline": 2}))
    selector = labels.selector_text(labels.role_selector(GROUPED, labels.ROLE_SERVE))
    before = cluster.mark_pods_ready(namespace, selector, 2)
    report_failed(cluster, before[0], "error: a rank is lost")
    old = {pod["metadata"]["uid"] for pod in before}

    def is_new() -> bool:
        now = running(cluster, namespace, selector)
        return len(now) == 2 and not old & {pod["metadata"]["uid"] for pod in now}

    wait_until(is_new, 30, "the group to be made anew")


def remove_strays(cluster: ControlPlane, namespace: str) -> None:
    """One child of each kind that the manifest does not ask for, as an earlier release may have left it."""
    for kind in LISTED_CHILD_KINDS:
        own = cluster.request("get", path_of(kind, namespace), labelSelector=labels.SERVICE_LABEL)["items"]
        assert own, f"no {kind.kind} is made, so no right on it is needed"
        cluster.request("post", path_of(kind, namespace), {**stray_of(own[0]), "kind": kind.kind})
        gone = partial(cluster.exists, path_of(kind, namespace, STRAY))
        wait_until(lambda gone=gone: not gone(), 30, f"the stray {kind.kind} to be deleted")  # type: ignore[misc]


def stray_of(child: KubeObject) -> KubeObject:
    kept = {key: child["metadata"][key] for key in ("namespace", "labels", "ownerReferences")}
    spec = {key: value for key, value in child.get("spec", {}).items() if key not in ("clusterIP", "clusterIPs")}
    content = {key: value for key, value in child.items() if key not in ("metadata", "spec", "status")}
    return {**content, "metadata": {**kept, "name": STRAY}} | ({"spec": spec} if spec else {})


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["cluster-wide", "namespaced"])
def test_every_right_of_the_operator_is_used_and_none_is_missing(
    helm: Helm,
    cluster: ControlPlane,
    monitoring_crds: None,
    namespace: str,
    other_namespace: str,
    tmp_path: Path,
    is_namespaced: bool,
) -> None:
    lease_namespace = other_namespace if is_namespaced else namespace
    helm.install(namespace, *(("--set", f"watch.namespaces={{{other_namespace}}}") if is_namespaced else ()))
    user = account(namespace)
    with running_installed(cluster, namespace, tmp_path) as operator:
        operator.wait_until_ready()
        live_through(cluster, user, other_namespace, lease_namespace)
    refused = [event["requestURI"] for event in requests_of(cluster, user) if event["responseStatus"]["code"] == 403]
    assert refused == []
    rights = granted(cluster, user, other_namespace) | granted(cluster, user, lease_namespace)
    assert rights - used(cluster, user) == NEVER_ASKED


def test_a_cluster_wide_operator_has_equal_rights_everywhere_and_beside_its_leases_those_on_them(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace)
    user = account(namespace)
    rights = granted(cluster, user, other_namespace)
    assert rights == permissions(rules_of("kvasir.serviceRules")) & (known_permissions(cluster) | NEVER_ASKED)
    assert granted(cluster, user, namespace) == granted(cluster, user, "default") == rights | OF_LEASES
    renew = ("coordination.k8s.io", "leases", "update")
    allowed = {name: is_allowed(cluster, user, renew, "default", name) for name in (CLUSTER_LEASE, "somebody-elses")}
    assert allowed == {CLUSTER_LEASE: True, "somebody-elses": False}


def test_a_namespaced_operator_has_its_rights_there_and_none_elsewhere(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace, "--set", f"watch.namespaces={{{other_namespace}}}")
    assert granted(cluster, account(namespace), other_namespace) > OF_LEASES
    assert granted(cluster, account(namespace), namespace) == set()
    assert granted(cluster, account(namespace), "default") == set()


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["cluster-wide", "namespaced"])
def test_the_operator_may_bind_the_role_of_routers_and_no_other(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, is_namespaced: bool
) -> None:
    kind = "roles" if is_namespaced else "clusterroles"
    helm.install(namespace, *(("--set", f"watch.namespaces={{{other_namespace}}}") if is_namespaced else ()))
    bind = ("rbac.authorization.k8s.io", kind, "bind")
    assert is_allowed(cluster, account(namespace), bind, other_namespace, "kvasir-router")
    assert not is_allowed(cluster, account(namespace), bind, other_namespace, "cluster-admin")
    assert not is_allowed(cluster, account(namespace), ("", "pods", "impersonate"), other_namespace)


@pytest.mark.parametrize("is_namespaced", [False, True], ids=["cluster-wide", "namespaced"])
def test_a_router_may_watch_the_endpoints_of_its_namespace_and_nothing_else(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str, tmp_path: Path, is_namespaced: bool
) -> None:
    helm.install(namespace, *(("--set", f"watch.namespaces={{{other_namespace}}}") if is_namespaced else ()))
    router = account(other_namespace, labels.router_name(NAME))
    with running_installed(cluster, namespace, tmp_path) as operator:
        operator.wait_until_ready()
        cluster.apply(manifest(other_namespace))
        cluster.wait_for_pods(other_namespace, labels.selector_text(labels.role_selector(NAME, labels.ROLE_ROUTER)), 2)
    assert granted(cluster, router, other_namespace) == permissions(rules_of("kvasir.routerRules"))
    assert granted(cluster, router, namespace) == set()


def test_who_may_view_or_edit_a_namespace_may_view_or_edit_its_services(
    helm: Helm, cluster: ControlPlane, namespace: str
) -> None:
    helm.install(namespace)
    for role in USERS:
        cluster.apply(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "RoleBinding",
                "metadata": {"name": role, "namespace": namespace},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": f"{role}or"}],
            }
        )
    # A controller adds the chart's rights to Kubernetes' roles in a moment of its own.
    for role, verbs in USERS.items():
        wait_until(partial(has_verbs, cluster, f"{role}or", verbs, namespace), 20, f"{role} to allow {sorted(verbs)}")


def has_verbs(cluster: ControlPlane, user: str, verbs: set[str], namespace: str) -> bool:
    """Whether a user may do these to services, and no more."""
    asked = [("serving.kvasir.dev", "inferenceservices", verb) for verb in USERS["edit"]]
    return {each[2] for each in asked if is_allowed(cluster, user, each, namespace)} == verbs
