"""docs/install.md from the top to its end, typed as a reader does, with images from a registry."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.rig.guest import running_guest
from e2e.cluster.rig.layout import HOME, REGISTRIES
from e2e.cluster.rig.network import IPV4
from e2e.conftest import RIG_KUBECONFIG, VERSION, install_operator
from e2e.five_commands.registry import filled_registry
from e2e.helm.helm import ROOT, Helm
from e2e.live_cluster import SYSTEM, LiveCluster
from e2e.model_download.hub import serving_hub
from e2e.traffic.answers import chat_answer
from e2e.verdicts import Verdicts
from tests.controlplane.programs import program_directory
from tests.docs.commands import documented
from tests.images.registry import unused_port

PAGE = "docs/install.md"
NAMESPACE = "models"
REGISTRY, REGISTRY_PORT = "registry.example.com", 8471
BYTES_PER_SECOND = 100_000_000
ELSEWHERE = ("make setup", "images/release ")
"""Run by tests/images."""
COMMANDS = [each.text for each in documented() if each.page == PAGE and not each.text.startswith(ELSEWHERE)]
LAST = "helm uninstall "

pytestmark = pytest.mark.timeout(900, func_only=True)


class Terminal:
    """One shell after the other in a folder with the page's files; programs that are sent to the background live on."""

    def __init__(self, folder: Path, cluster: LiveCluster, hub: str) -> None:
        self.folder, self.hub, self.port = folder, hub, unused_port()
        path = f"{program_directory(has_nodes=True)}:{os.environ['PATH']}"
        self.environment = cluster.environment | {"PATH": path, "HOME": str(folder)}
        self.background: list[subprocess.Popen[bytes]] = []

    def type(self, text: str) -> str:
        """What it prints; nothing of one that goes to the background."""
        text = text.replace("127.0.0.1:8080", f"127.0.0.1:{self.port}").replace(" 8080 &", f" {self.port}:8080 &")
        if text.startswith(("helm install ", "helm upgrade ")):  # the pods have no other way to a hub
            text += " --set podDefaults.engine.pod.env[0].name=HF_ENDPOINT"
            text += f" --set podDefaults.engine.pod.env[0].value={self.hub}"
        if text.endswith("&"):
            command = ["bash", "-c", f"exec {text.removesuffix('&')}"]
            self.background.append(subprocess.Popen(command, cwd=self.folder, env=self.environment))
            return ""
        done = subprocess.run(
            ["bash", "-c", text], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout

    def close(self) -> None:
        for process in self.background:
            process.terminate()
            process.wait()


@pytest.fixture
def hub(live_cluster: LiveCluster) -> Iterator[str]:
    if live_cluster.kubeconfig != RIG_KUBECONFIG:
        pytest.skip("its registry is in the network of the rig's control plane: unset KUBECONFIG")
    with serving_hub(BYTES_PER_SECOND) as url:
        yield url


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[None]:
    """That of the page, with the images of this tree; every node finds it."""
    address = f"{IPV4.control_plane}:{REGISTRY_PORT}"
    hosts = REGISTRIES / REGISTRY / "hosts.toml"
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text(f'[host."http://{address}"]\ncapabilities = ["pull", "resolve"]\n')
    with running_guest("registry", filled_registry(HOME / "registry", "kvasir", VERSION, address)):
        yield
    hosts.unlink()


@pytest.fixture
def terminal(
    live_cluster: LiveCluster, live_helm: Helm, registry: None, hub: str, tmp_path: Path
) -> Iterator[Terminal]:
    """Where no release is; another scenario finds its own again."""
    for release in live_helm.releases():
        live_helm.uninstall(release["namespace"])
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    for name, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", (ROOT / PAGE).read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    opened = Terminal(tmp_path, live_cluster, hub)
    yield opened
    opened.close()
    live_cluster.kubectl("delete", "inferenceservices", "--all", f"--namespace={NAMESPACE}", "--ignore-not-found")
    live_cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
    live_cluster.kubectl("delete", "priorityclass", "serving", "--ignore-not-found")
    install_operator(live_helm)


def test_every_command_of_the_page_does_what_it_says(terminal: Terminal, verdicts: Verdicts) -> None:
    [ask] = [each for each in COMMANDS if each.startswith("curl ")]
    question = json.loads(re.findall(r"-d '(.*)'", ask)[0])
    expected = chat_answer(question["messages"][0]["content"], question["max_tokens"])
    moments = {}
    for text in COMMANDS:
        if text.startswith(LAST):
            assert content(terminal.type(ask)) == expected, "before the operator is gone"
        printed = terminal.type(text)
        moments[text] = time.time()
        if text == ask:
            assert content(printed) == expected
    assert content(terminal.type(ask)) == expected, "a service needs no operator"
    [begun] = [moments[each] for each in COMMANDS if each.startswith("kubectl create namespace")]
    verdicts.add("five commands: seconds to the first answer", None, "", first_answer=moments[ask] - begun)
    assert not any(each.startswith("helm") and SYSTEM not in each for each in COMMANDS)


def content(answer: str) -> str:
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text
