"""The installed ServiceAccount may do what the operator needs, and nothing else: every right is asked for."""

from functools import partial
from typing import Any

from e2e.helm.helm import Helm
from tests.charts.test_copies import permissions
from tests.controlplane.control_plane import ControlPlane
from tests.controlplane.processes import wait_until
from tests.controlplane.test_operator_process import ROLE_RULES

Permission = tuple[str, str, str]
NEEDED = permissions(ROLE_RULES)
OF_LEASES = {permission for permission in NEEDED if permission[1] == "leases"}
USERS = {
    "view": {"get", "list", "watch"},
    "edit": {"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"},
}


def known_permissions(cluster: ControlPlane) -> set[Permission]:
    """Every verb of every resource that the API server has, subresources included."""
    groups = [group["preferredVersion"]["groupVersion"] for group in cluster.request("get", "/apis")["groups"]]
    lists = [cluster.request("get", f"/apis/{group}") for group in groups] + [cluster.request("get", "/api/v1")]
    return {
        (each["groupVersion"].rpartition("/")[0], resource["name"], verb)
        for each in lists
        for resource in each["resources"]
        for verb in resource["verbs"]
    }


def is_allowed(cluster: ControlPlane, user: str, permission: Permission, namespace: str, *groups: str) -> bool:
    group, resource, verb = permission
    resource, _, subresource = resource.partition("/")
    asked: dict[str, Any] = {"group": group, "resource": resource, "verb": verb, "namespace": namespace}
    spec = {"user": user, "groups": groups, "resourceAttributes": asked | {"subresource": subresource}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = cluster.request("post", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def granted(cluster: ControlPlane, release_namespace: str, namespace: str) -> set[Permission]:
    """What the operator's ServiceAccount may do in a namespace, by its own bindings alone."""
    user = f"system:serviceaccount:{release_namespace}:kvasir-operator"
    # Finalizers are a right without a resource that the API server would list.
    asked = known_permissions(cluster) | NEEDED
    return {each for each in asked if is_allowed(cluster, user, each, namespace)}


def test_a_cluster_wide_operator_has_its_rights_everywhere_and_its_lease_at_home(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace)
    assert granted(cluster, namespace, namespace) == NEEDED
    assert granted(cluster, namespace, other_namespace) == NEEDED - OF_LEASES


def test_a_namespaced_operator_has_its_rights_there_and_none_elsewhere(
    helm: Helm, cluster: ControlPlane, namespace: str, other_namespace: str
) -> None:
    helm.install(namespace, "--set", f"watch.namespace={other_namespace}")
    assert granted(cluster, namespace, other_namespace) == NEEDED
    assert granted(cluster, namespace, namespace) == set()


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
