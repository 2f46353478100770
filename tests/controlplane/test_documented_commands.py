"""The kubectl commands of the documentation, typed as they stand there.

An operator runs; a fake node says that the pods run. What a page makes, its commands find: manifests are taken from the
page, and NAME, NAMESPACE, POD, NODE and ROLE stand for the service of docs/install.md. What only a kubelet can answer
(logs, port-forward) must get as far as the API server.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.docs.commands import ROOT, Command, documented

from kvasir_operator.api.labels import role_selector, selector_text

from .control_plane import ControlPlane
from .fake_node import register_node
from .operator_process import running_operator
from .programs import program_directory
from .reconciling import engine_pods
from .test_optional_kinds import POD_MONITOR_CRD

SYSTEM, NAMESPACE, NAME, AUTOSCALED, NODE = "kvasir-system", "models", "llama", "autoscaled", "to-be-cordoned"
FIRST = "qwen"
"""The service with which docs/install.md begins."""
MAKES = r"kubectl (--namespace models )?(create (namespace|priorityclass)|apply) "
MAKING = [each for each in documented("kubectl ") if re.match(MAKES, each.text)]
"""Typed before all others, in the order of their page."""
KUBECTL = [command for command in documented("kubectl ") if command not in MAKING]
OF_A_KUBELET = re.compile(r" (logs|port-forward) ")
UNKNOWN = re.compile(r"unknown (flag|shorthand|command)|doesn't have a resource type|invalid argument")
SYSTEM_DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "kvasir-operator", "namespace": SYSTEM},
    "spec": {
        "selector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/component": "operator"}},
            "spec": {"containers": [{"name": "operator", "image": "kvasir-operator"}]},
        },
    },
}


@dataclass(frozen=True)
class Terminal:
    """Where a reader types: kubectl and its plug-in on PATH, and the page's manifests in the folder."""

    cluster: ControlPlane
    folder: Path

    def type(self, text: str) -> subprocess.CompletedProcess[str]:
        path = f"{program_directory()}:{ROOT / 'operator'}:{os.environ['PATH']}"
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig), "HOME": str(self.folder), "PATH": path}
        return subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60
        )

    def must(self, text: str) -> None:
        done = self.type(text)
        assert done.returncode == 0, f"{text}: {done.stderr}"

    def run_pods(self) -> None:
        for name, role, number in ((NAME, "serve", 2), (NAME, "router", 2), (FIRST, "serve", 1), (FIRST, "router", 1)):
            self.cluster.mark_pods_ready(NAMESPACE, selector_text(role_selector(name, role)), number)


def manifests(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def files(page: str) -> dict[str, str]:
    """What a page shows, by the file's name in the first line."""
    return {text.split("\n", 1)[0].removeprefix("# "): text for text in manifests(page) if text.startswith("# ")}


@pytest.fixture(scope="module")
def terminal(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """After the commands that make the services of docs/install.md, with their pods running."""
    folder = tmp_path_factory.mktemp("documented")
    pages = files("docs/install.md")
    for name, text in pages.items():
        (folder / name).write_text(text)
    values = yaml.safe_load(pages["values.yaml"])
    defaults = values["podDefaults"] | {"profiles": values["profiles"]}  # as the chart hands them on
    (folder / "defaults").write_text(yaml.safe_dump(defaults))
    control_plane.create_namespace(SYSTEM)
    register_node(control_plane, NODE)
    control_plane.apply(SYSTEM_DEPLOYMENT)
    control_plane.install_crd(POD_MONITOR_CRD)
    here = Terminal(control_plane, folder)
    flags = (f"--pod-defaults={folder / 'defaults'}", f"--namespace={NAMESPACE}")
    namespace, *services = [each.text for each in MAKING if each.page == "docs/install.md"]
    try:
        here.must(namespace)
        with running_operator(control_plane.operator_kubeconfig, folder / "log", *flags):
            for command in services:
                here.must(command)
            [autoscaled] = [text for text in manifests("docs/autoscaling.md") if "minReplicas" in text]
            (folder / "autoscaled.yaml").write_text(autoscaled.replace(f"name: {NAME},", f"name: {AUTOSCALED},"))
            here.must("kubectl apply --filename autoscaled.yaml")
            here.run_pods()
            yield here
            control_plane.delete_namespace(NAMESPACE)
    finally:
        control_plane.delete_namespace(SYSTEM)
        control_plane.remove_crd(POD_MONITOR_CRD["metadata"]["name"])


def filled(command: Command, terminal: Terminal) -> str:
    pod = engine_pods(terminal.cluster, NAMESPACE, NAME)[0]["metadata"]["name"]
    name = AUTOSCALED if '"autoscaling"' in command.text else NAME
    names = {"NAMESPACE": NAMESPACE, "NAME": name, "POD": pod, "NODE": NODE, "ROLE": "serve"}
    text = re.sub(r"\b(NAMESPACE|NAME|POD|NODE|ROLE)\b", lambda found: names[found[0]], command.text)
    if command.page == "README.md":  # whose service goes to the namespace that is set
        text = text.replace("kubectl ", f"kubectl --namespace {NAMESPACE} ", 1)
    return text.removesuffix("&")


@pytest.mark.parametrize("command", KUBECTL, ids=str)
def test_a_command_of_the_documentation_is_answered(terminal: Terminal, command: Command) -> None:
    done = terminal.type(filled(command, terminal))
    said = f"{done.stdout}\n{done.stderr}"
    assert not UNKNOWN.search(said), said
    if not OF_A_KUBELET.search(command.text):
        assert done.returncode == 0, said


def test_the_service_of_the_readme_is_accepted(terminal: Terminal) -> None:
    [command] = [each for each in MAKING if each.page == "README.md"]
    folder = terminal.folder / "readme"
    folder.mkdir()
    (folder / "service.yaml").write_text(files("README.md")["service.yaml"])
    terminal.must(f"cd readme && {command.text} --dry-run=server")
