"""Accounts with the rights that the chart gives an operator, and with others; and which rights were used."""

from pathlib import Path

from tests.charts.chart_rules import Permission, operator_rules

from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.settings import OperatorSettings

from .control_plane import ControlPlane, Write
from .credentials import write_kubeconfig

RBAC = "rbac.authorization.k8s.io"
ACCOUNT = "kvasir-operator"
CREATED = 201
READS = ("get", "list", "watch")


def account(namespace: str, name: str = ACCOUNT) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def role_kubeconfig(control_plane: ControlPlane, namespace: str, directory: Path, name: str = ACCOUNT) -> Path:
    """Credentials of a ServiceAccount that has the chart's Role in one namespace, and no other right."""
    kubeconfig, user = account_kubeconfig(control_plane, namespace, directory, name), account(namespace, name)
    grant(control_plane, namespace, user, operator_rules(OperatorSettings().router_cluster_role))
    return kubeconfig


def account_kubeconfig(control_plane: ControlPlane, namespace: str, directory: Path, name: str) -> Path:
    """Credentials of a new ServiceAccount, which may do nothing yet."""
    metadata = {"name": name, "namespace": namespace}
    control_plane.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = control_plane.request("post", path, request)["status"]["token"]
    certificate = control_plane.directory / "tls" / "apiserver.crt"
    kubeconfig = directory / f"{namespace}-{name}.kubeconfig"
    write_kubeconfig(kubeconfig, control_plane.url, certificate, name, token)
    return kubeconfig


def grant(control_plane: ControlPlane, namespace: str, user: str, rules: list[KubeObject]) -> None:
    """To a ServiceAccount, in one namespace."""
    name = user.rpartition(":")[2]
    metadata = {"name": name, "namespace": namespace}
    control_plane.apply({"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": metadata, "rules": rules})
    control_plane.apply(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": name},
            "subjects": [{"kind": "User", "apiGroup": RBAC, "name": user}],
        }
    )


def changes(control_plane: ControlPlane, user: str, namespace: str, resource: str | None = None) -> list[Write]:
    """What a user changed so far; the log has all requests of a ServiceAccount. `resource` None: of all."""
    writes = [each for each in control_plane.writes(user, namespace) if resource in (None, each.resource)]
    return [write for write in writes if write.verb not in READS and write.status < 400]


def requests_of(control_plane: ControlPlane, user: str, namespace: str | None = None) -> list[KubeObject]:
    """The API server's answers to a user about objects, by its audit log; `namespace` None: of all."""
    events = control_plane.audit.events()
    own = [each for each in events if each["user"]["username"] == user and "resource" in each.get("objectRef", {})]
    return [event for event in own if namespace in (None, event["objectRef"].get("namespace"))]


def used(control_plane: ControlPlane, user: str, namespace: str | None = None) -> set[Permission]:
    """What a user's requests needed. A server-side apply that made the object needed the right to create it too."""
    needed = set()
    for event in requests_of(control_plane, user, namespace):
        about = event["objectRef"]
        resource = "/".join(part for part in (about["resource"], about.get("subresource")) if part)
        needed.add((about.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == CREATED:
            needed.add((about.get("apiGroup", ""), resource, "create"))
    return needed


def refused(control_plane: ControlPlane, user: str) -> list[str]:
    """What a user asked for and was denied."""
    return [each["requestURI"] for each in requests_of(control_plane, user) if each["responseStatus"]["code"] == 403]
