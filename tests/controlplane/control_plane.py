"""A real Kubernetes control plane for tests: etcd, kube-apiserver and kube-controller-manager on a loopback address.

It needs no root, no network and no Debian package. There is no scheduler and no real kubelet: pods stay Pending until
a test says what a node would (`mark_pods_ready`). Each run has an address of its own, so that ports never collide.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError
from kubernetes.watch.watch import iter_resp_lines
from tests.controlplane.audit_log import AuditLog
from tests.controlplane.credentials import (
    ADMIN,
    CONTROLLERS,
    OPERATOR,
    write_kubeconfig,
    write_signing_key,
    write_tokens,
)
from tests.controlplane.fake_node import (
    NODE,
    FakeKubelet,
    bind_pod,
    end_terminating,
    list_pods,
    register_node,
    report_ready,
    report_waiting,
)
from tests.controlplane.processes import ServerProcess, wait_until
from tests.controlplane.programs import (
    API_PORT,
    api_server_command,
    controllers_command,
    etcd_command,
    unused_loopback_address,
    write_audit_policy,
)
from urllib3.exceptions import HTTPError

START_SECONDS = 90.0  # a bound for a crowded machine; a quiet one takes under 5
JSON = "application/json"
APPLY_PATCH = "application/apply-patch+yaml"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@dataclass(frozen=True)
class Write:
    """One request that asked for a change, as the API server's audit log has it."""

    verb: str
    resource: str
    """Plural, with the subresource: `pods`, `inferenceservices/status`."""
    namespace: str | None
    name: str | None
    status: int
    """HTTP status of the answer."""


@dataclass(frozen=True)
class ControlPlane:
    """A running API server with its controllers. Every user is an administrator; they differ by name in `writes`."""

    url: str
    directory: Path
    """Data, logs (`kube-apiserver.log`, ...) and credentials of this run."""
    kubeconfig: Path
    """Of the user `admin`, whom the tests act as."""
    operator_kubeconfig: Path
    """Of the user `operator`, for an operator under test, so that its requests can be told from the tests' own."""
    api: ApiClient
    dynamic: DynamicClient
    audit: AuditLog
    resources: ExitStack
    """Closed at the end, while all of it still runs."""

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, content_type: str = JSON, **query: str
    ) -> dict[str, Any]:
        """One request to the API server, answered with its JSON; a refusal raises kubernetes' DynamicApiError."""
        answer = self.dynamic.request(
            method, path, body=body, content_type=content_type, query_params=list(query.items()), serialize=False
        )
        content: dict[str, Any] = json.loads(answer.data)
        return content

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """Events of what is there and of what changes, until the server is gone; raises urllib3's HTTPError then."""
        answer = self.dynamic.request("get", path, query_params=[("watch", "true"), *query.items()], serialize=False)
        with closing(answer):
            yield from map(json.loads, iter_resp_lines(answer))

    def apply(self, manifest: dict[str, Any], field_manager: str = "kubectl", **query: str) -> dict[str, Any]:
        """Server-side apply with strict validation, as `kubectl apply --server-side`; returns what is stored."""
        kind = self.dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        namespace = manifest["metadata"].get("namespace", "default") if kind.namespaced else None
        path = kind.path(name=manifest["metadata"]["name"], namespace=namespace)
        strict = {"fieldManager": field_manager, "fieldValidation": "Strict"}
        return self.request("patch", path, manifest, APPLY_PATCH, **strict | query)

    def install_crd(self, manifest: dict[str, Any]) -> None:
        """Apply a CustomResourceDefinition and wait until its kind is served."""
        self.wait_until_served(self.apply(manifest)["metadata"]["name"])

    def remove_crd(self, name: str) -> None:
        """And wait until it has gone: whoever installs it next would find the one that goes."""
        self.request("delete", f"{CRDS}/{name}")
        wait_until(lambda: not self.exists(f"{CRDS}/{name}"), 30, f"CRD {name} to go")

    def wait_until_served(self, crd: str) -> None:
        """The kind of a CustomResourceDefinition that exists; raises TimeoutError after 20 s."""
        wait_until(lambda: is_established(self.request("get", f"{CRDS}/{crd}")), 20, f"CRD {crd} to be established")

    def writes(self, user: str = OPERATOR, namespace: str | None = None) -> list[Write]:
        """Every change that `user` asked for so far, in order, refused ones and ones without effect included."""
        found = [as_write(event) for event in self.audit.events() if event["user"]["username"] == user]
        return [write for write in found if namespace is None or write.namespace == namespace]

    def wait_for_pods(self, namespace: str, selector: str, num_pods: int = 1) -> list[dict[str, Any]]:
        """At least `num_pods` pods that are not being deleted; raises TimeoutError after 30 s."""

        def enough() -> list[dict[str, Any]] | None:
            pods = [pod for pod in list_pods(self, namespace, selector) if "deletionTimestamp" not in pod["metadata"]]
            return pods if len(pods) >= num_pods else None

        return wait_until(enough, 30, f"{num_pods} pods with {selector} in namespace {namespace}")

    def mark_pods_ready(
        self, namespace: str, selector: str, num_pods: int = 1, node: str = NODE, ago: timedelta = timedelta()
    ) -> list[dict[str, Any]]:
        """Wait for `num_pods` pods or more, bind all of them to `node`, report them running and ready, and return them.

        They say that they became ready `ago`, which may be before they were made.
        A deleted pod is gone within a second if its node is NODE. On a node of any other name it stays Terminating
        until `end_terminating_pods`, as a real pod does until its processes have ended. Raises TimeoutError when the
        pods do not appear within 30 s.
        """
        pods = self.wait_for_pods(namespace, selector, num_pods)
        register_node(self, node)
        for pod in pods:
            bind_pod(self, pod, node)
        return [report_ready(self, pod, ago) for pod in pods]

    def mark_pods_waiting(
        self, namespace: str, selector: str, reason: str, message: str, num_pods: int = 1
    ) -> list[dict[str, Any]]:
        """As `mark_pods_ready`, but report that the containers wait, for instance with reason ImagePullBackOff."""
        return [report_waiting(self, pod, reason, message) for pod in self.wait_for_pods(namespace, selector, num_pods)]

    def end_terminating_pods(self, namespace: str, selector: str = "") -> None:
        """Let go of the pods that are being deleted, as a kubelet does once their processes have ended."""
        end_terminating(self, list_pods(self, namespace, selector))

    def create_namespace(self, name: str) -> None:
        """Create a namespace and wait until pods can be created in it."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        wait_until(lambda: self.admits_pods(name), 30, f"the default ServiceAccount of namespace {name}")

    def admits_pods(self, namespace: str) -> bool:
        """Whether the controllers have made the default ServiceAccount, without which pods are refused."""
        return self.exists(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")

    def delete_namespace(self, name: str) -> None:
        """Begin the deletion, and end the namespace's bound pods, which no kubelet will; returns before it is gone."""
        self.request("delete", f"/api/v1/namespaces/{name}")
        self.request("delete", f"/api/v1/namespaces/{name}/pods", gracePeriodSeconds="0")

    def exists(self, path: str) -> bool:
        try:
            self.request("get", path)
        except NotFoundError:
            return False
        return True


@contextmanager
def running_control_plane(programs: Path, directory: Path, crds: Sequence[Path] = ()) -> Iterator[ControlPlane]:
    """Start the three programs with their data and logs in `directory`, and kill them at the end.

    `crds` are installed before the controllers start: the garbage collector looks for new kinds every 30 s only.
    Raises ControlPlaneError with a program's last words when it does not come up.
    """
    address = unused_loopback_address()
    url, certificate = f"https://{address}:{API_PORT}", directory / "tls" / "apiserver.crt"
    write_signing_key(directory / "signing.key")
    write_audit_policy(directory / "audit-policy.json")
    tokens = write_tokens(directory / "tokens.csv")
    for user, token in tokens.items():
        write_kubeconfig(directory / f"{user}.kubeconfig", url, certificate, user, token)
    with ExitStack() as stack:
        kubelet = FakeKubelet()
        stack.callback(kubelet.join)  # when the API server is gone

        def start(command: list[str]) -> ServerProcess:
            process = ServerProcess(command, directory / f"{Path(command[0]).name}.log")
            stack.callback(process.kill)
            return process

        start(etcd_command(programs, directory, address))
        server = start(api_server_command(programs, directory, address))
        server.wait_until(certificate.exists, START_SECONDS, f"{certificate} to be written")
        api = stack.enter_context(api_client(client_configuration(url, certificate, tokens[ADMIN])))
        server.wait_until(lambda: is_ready(api), START_SECONDS, f"{url}/readyz to answer ok")
        control_plane = ControlPlane(
            url=url,
            directory=directory,
            kubeconfig=directory / f"{ADMIN}.kubeconfig",
            operator_kubeconfig=directory / f"{OPERATOR}.kubeconfig",
            api=api,
            dynamic=DynamicClient(api, cache_file=str(directory / "discovery.json")),  # type: ignore[no-untyped-call]
            audit=AuditLog(directory / "audit.log"),
            resources=stack,
        )
        for crd in crds:
            control_plane.install_crd(yaml.safe_load(crd.read_text()))
        controllers = start(controllers_command(programs, directory, directory / f"{CONTROLLERS}.kubeconfig"))
        controllers.wait_until(lambda: control_plane.admits_pods("default"), START_SECONDS, "the first ServiceAccount")
        kubelet.start(control_plane)
        yield control_plane


@contextmanager
def api_client(configuration: Configuration) -> Iterator[ApiClient]:
    """Which closes its connections at the end; its own `close` leaves them to the garbage collector."""
    with ApiClient(configuration) as api:
        yield api
        api.rest_client.pool_manager.clear()


def is_ready(api: ApiClient) -> bool:
    try:
        answer = api.call_api("GET", f"{api.configuration.host}/readyz")
    except HTTPError:
        return False
    return bool(answer.status == 200)


def client_configuration(url: str, certificate: Path, token: str) -> Configuration:
    configuration = Configuration(host=url)
    configuration.ssl_ca_cert = str(certificate)
    configuration.api_key = {"BearerToken": f"Bearer {token}"}
    return configuration


def is_established(crd: dict[str, Any]) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []  # null until the API server has looked at it
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


def as_write(event: dict[str, Any]) -> Write:
    about = event.get("objectRef", {})
    resource = "/".join(part for part in (about.get("resource", ""), about.get("subresource")) if part)
    status = event.get("responseStatus", {}).get("code", 0)
    return Write(event["verb"], resource, about.get("namespace"), about.get("name"), status)
