"""The installed ServiceAccount may do what the operator asks for, and nothing else.

Neither side is a list that somebody wrote: what is granted is asked of the API server, verb by verb; what is used is
read from its audit log, after the operator has lived through a service's life.
"""

from functools import partial
from pathlib import Path

import pytest
from e2e.helm.helm import Helm
from e2e.helm.installed import OPERATOR, running_installed
from kubernetes.dynamic.exceptions import NotFoundError
from tests.charts.chart_rules import Permission, permissions, rules_of
from tests.controlplane.control_plane import ControlPlane
from tests.controlplane.processes import wait_until
from tests.controlplane.reconciling import NAME, manifest
from tests.controlplane.rights import refused, used
from tests.controlplane.service_life import live_through

from kvasir_operator.api import labels
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE

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
    with running_installed(cluster, namespace, tmp_path, "--resync-seconds=5") as operator:
        operator.wait_until_ready()
        live_through(cluster, user, other_namespace, lease_namespace)
    assert refused(cluster, user) == []
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
