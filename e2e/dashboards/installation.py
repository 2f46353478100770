"""An installation without a cluster, its programs real: those of `kvasir-operator local`, an operator, Prometheus.

The operator runs over the tests' control plane, whose pods nobody starts. Each of them stands for one of the local
processes of its service and role, and Prometheus scrapes that process with the pod's labels, as PodMonitors say.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import yaml
from e2e.cluster.rig.discovery import target_groups
from e2e.cluster.rig.scraping import scrape_configs
from tests.controlplane.control_plane import ControlPlane, running_control_plane
from tests.controlplane.fake_node import NODE, bind_pod, list_pods, report_ready
from tests.controlplane.operator_process import OperatorProcess, running_operator
from tests.controlplane.processes import wait_until
from tests.controlplane.programs import program_directory
from tests.dashboards.prometheus import Prometheus, running_prometheus
from tests.local.conftest import LocalService

from kvasir_operator.api import labels
from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.desired.roles import engine_roles, router_roles
from kvasir_operator.resources.pod_monitor import pod_monitor
from kvasir_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
SERVICES = Path(__file__).with_name("services.yaml")
NAMESPACE, SYSTEM, GATEWAY = "models", "kvasir-system", "kvasir-gateway"
GATEWAY_PODS = {"app": GATEWAY}
SCRAPE_SECONDS = 2
START_SECONDS = 240.0  # a bound for a crowded machine; a quiet one takes 30

KubeObject = dict[str, Any]


@dataclass(frozen=True)
class Installation:
    """`urls`: where clients reach each service; `addresses`: of each process of `local`, by its name there."""

    control_plane: ControlPlane
    prometheus: Prometheus
    urls: Mapping[str, str]
    local: LocalService
    addresses: Mapping[str, str]

    def kill(self, process: str) -> None:
        """An engine; it is started again."""
        address = self.addresses[process]
        pids = [pid for pid, command in self.local.processes().items() if f"--host {address} " in command]
        os.killpg(os.getpgid(min(pids)), signal.SIGKILL)


@contextmanager
def running_installation(folder: Path) -> Iterator[Installation]:
    """All services ready and scraped; `folder` takes what the programs write."""
    with ExitStack() as stack:
        local = LocalService(local_manifest(folder))
        stack.callback(local.stop)
        directory = folder / "control-plane"
        directory.mkdir()
        crds = sorted((ROOT / "crds").glob("*.yaml"))
        control_plane = stack.enter_context(running_control_plane(program_directory(has_nodes=True), directory, crds))
        for namespace in (NAMESPACE, SYSTEM):
            control_plane.create_namespace(namespace)
        gateway_pod = make_gateway(control_plane)
        prometheus = stack.enter_context(running_prometheus(folder, configs(folder)))
        operator = stack.enter_context(installed_operator(control_plane, prometheus, folder))
        for manifest in manifests():
            control_plane.apply(manifest)
        urls, addresses = wait_until(lambda: local_services(local), START_SECONDS, "the local services to be ready")
        (folder / "system.json").write_text(
            json.dumps([gateway_target(gateway_pod, addresses), operator_target(operator)])
        )
        stack.enter_context(kubelet(control_plane, addresses, folder / "pods.json"))
        wait_until(lambda: all_are_scraped(prometheus), START_SECONDS, "Prometheus to scrape all programs")
        yield Installation(control_plane, prometheus, urls, local, addresses)


def manifests() -> list[KubeObject]:
    return list(yaml.safe_load_all(SERVICES.read_text()))


def local_manifest(folder: Path) -> Path:
    """The same services with the most replicas that they may come to: processes that wait for a pod to stand for."""
    path = folder / SERVICES.name
    services = manifests()
    for service in services:
        if scaled := service["spec"].pop("autoscaling", None):
            service["spec"]["replicas"] = scaled["maxReplicas"]
    path.write_text(yaml.safe_dump_all(services))
    (folder / "models").symlink_to(ROOT / "examples" / "models")
    return path


def local_services(local: LocalService) -> tuple[dict[str, str], dict[str, str]] | None:
    """URLs by service and addresses by process, once all services are ready."""
    assert local.process.poll() is None, "".join(local.lines)
    text = "".join(local.lines)
    urls = dict(re.findall(r"(\S+) is ready after .*: (http://\S+)/v1 serves", text))
    listeners = re.findall(r"(\S+) starting at (.+)", text)
    addresses = {name: str(urlsplit(found.split(", ")[-1]).hostname) for name, found in listeners}
    return (urls, addresses) if len(urls) == len(manifests()) else None


def make_gateway(control_plane: ControlPlane) -> str:
    """As far as the operator looks at it; the process is one of `local`. Returns its pod's name."""
    pod = {"metadata": {"labels": GATEWAY_PODS}, "spec": {"containers": [{"name": "router", "image": "router"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": GATEWAY_PODS}, "template": pod}
    metadata = {"name": GATEWAY, "namespace": SYSTEM}
    control_plane.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    [made] = control_plane.mark_pods_ready(SYSTEM, f"app={GATEWAY}")
    return str(made["metadata"]["name"])


@contextmanager
def installed_operator(control_plane: ControlPlane, prometheus: Prometheus, folder: Path) -> Iterator[OperatorProcess]:
    """One that leads, and scales by `prometheus`."""
    defaults = {"gateway": {"namespace": SYSTEM, "name": GATEWAY, "podLabels": GATEWAY_PODS}}
    (folder / "defaults.json").write_text(json.dumps(defaults))  # JSON is YAML
    flags = (
        f"--namespace={NAMESPACE}", f"--prometheus-url={prometheus.url}", f"--pod-defaults={folder / 'defaults.json'}",
    )  # fmt: skip
    log = folder / "operator.log"
    with (
        patch.dict(os.environ, {labels.GATEWAY_SECRET_ENV: "of-the-gateway"}),
        running_operator(control_plane.operator_kubeconfig, log, *flags) as operator,
    ):
        operator.wait_until_ready()
        yield operator


def configs(folder: Path) -> list[dict[str, Any]]:
    """Of the PodMonitors that the operator makes; the chart's, of gateway and operator, come to the targets' labels."""
    settings = OperatorSettings()
    monitors = [
        pod_monitor(service, role, settings)
        for service in load_manifests(SERVICES).services
        for role in (*engine_roles(service, settings.defaults), *router_roles(service, settings.defaults))
    ]
    of_services = [each for monitor in monitors if monitor for each in scrape_configs(monitor, f"{folder}/pods.json")]
    system = {"job_name": "system", "file_sd_configs": [{"files": [f"{folder}/system.json"]}]}
    pace = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
    return [each | pace for each in (*of_services, system)]


def gateway_target(pod: str, addresses: Mapping[str, str]) -> dict[str, Any]:
    own = {"namespace": SYSTEM, "pod": pod, "container": "router", "endpoint": "admin", "role": "router"}
    return {"targets": [f"{addresses['gateway']}:{labels.ROUTER_ADMIN_PORT}"], "labels": own}


def operator_target(operator: OperatorProcess) -> dict[str, Any]:
    own = {"namespace": SYSTEM, "pod": "kvasir-operator-0", "container": "operator", "endpoint": "metrics"}
    return {"targets": [urlsplit(operator.url).netloc], "labels": own}


@contextmanager
def kubelet(control_plane: ControlPlane, addresses: Mapping[str, str], targets: Path) -> Iterator[None]:
    """In a thread: each pod that is made stands for a process from now on, is ready, and one of Prometheus' `targets`.

    A pod for which no process is left stays Pending.
    """
    stop = threading.Event()
    processes: dict[str, str] = {}

    def run() -> None:
        while not stop.wait(0.5):
            pods = [pod for pod in list_pods(control_plane, NAMESPACE) if "deletionTimestamp" not in pod["metadata"]]
            assign(pods, processes, addresses)
            ready = [made_ready(control_plane, pod) for pod in pods if pod["metadata"]["name"] in processes]
            write_targets([at(pod, addresses[processes[pod["metadata"]["name"]]]) for pod in ready], targets)

    thread = threading.Thread(target=run, name="kubelet")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def assign(pods: list[KubeObject], processes: dict[str, str], addresses: Mapping[str, str]) -> None:
    """`processes`, by pod: those of pods that are gone are free again."""
    names = {pod["metadata"]["name"] for pod in pods}
    for gone in processes.keys() - names:
        del processes[gone]
    for pod in pods:
        own = pod["metadata"]["labels"]
        prefix = f"{own[labels.SERVICE_LABEL]}-{own[labels.ROLE_LABEL]}-"
        free = sorted(each for each in addresses if each.startswith(prefix) and each not in processes.values())
        if pod["metadata"]["name"] not in processes and free:
            processes[pod["metadata"]["name"]] = free[0]


def made_ready(control_plane: ControlPlane, pod: KubeObject) -> KubeObject:
    if "podIP" in pod["status"]:
        return pod
    bind_pod(control_plane, pod, NODE)
    return report_ready(control_plane, pod)


def at(pod: KubeObject, address: str) -> KubeObject:
    """An API server takes no loopback address for an endpoint's: only Prometheus is told it."""
    return pod | {"status": pod["status"] | {"podIP": address}}


def write_targets(pods: list[KubeObject], path: Path) -> None:
    text = json.dumps(target_groups(pods), indent=1)
    if not path.exists() or path.read_text() != text:
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)  # whole or not at all: Prometheus may read it just now


def all_are_scraped(prometheus: Prometheus) -> bool:
    """Every role of every service, the gateway and the operator."""
    health = prometheus.target_health()
    jobs = {str(config["job_name"]) for config in configs(Path())}
    return health.keys() == jobs and all(all(each) for each in health.values())
