"""The real helm, as a user calls it, with a home of its own."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.controlplane.programs import program_directory

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvasir"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE = "kvasir"
REGISTRY_NAMED = ("--values", CHART / "ci" / "default-values.yaml")
"""What every install must give; values that a test gives after it win."""


class HelmError(Exception):
    """helm ended with a status other than 0; the message is what it said."""


def helm_program() -> Path:
    """That of the scenarios' programs; builds them the first time."""
    return program_directory(has_nodes=True) / "helm"


@dataclass(frozen=True)
class Helm:
    """`kubeconfig` None is for the commands that need no cluster."""

    program: Path
    home: Path
    kubeconfig: Path | None = None

    def run(self, *arguments: str | Path) -> str:
        """What helm printed; raises HelmError."""
        environment = {"HOME": str(self.home), "KUBECONFIG": str(self.kubeconfig or "/dev/null")}
        command = [str(each) for each in (self.program, *arguments)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if ended.returncode != 0:
            raise HelmError(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
        return ended.stdout

    def template(self, *arguments: str | Path, namespace: str = "kvasir-system") -> list[dict[str, Any]]:
        """The objects of the chart, without a cluster."""
        text = self.run("template", RELEASE, CHART, "--namespace", namespace, *REGISTRY_NAMED, *arguments)
        return [obj for obj in yaml.safe_load_all(text) if obj]

    def install(self, namespace: str, *arguments: str | Path, chart: Path = CHART) -> str:
        return self.run("install", RELEASE, chart, "--namespace", namespace, *REGISTRY_NAMED, *arguments)

    def upgrade(self, namespace: str, *arguments: str | Path, chart: Path = CHART) -> str:
        return self.run("upgrade", RELEASE, chart, "--namespace", namespace, *REGISTRY_NAMED, *arguments)

    def uninstall(self, namespace: str) -> None:
        self.run("uninstall", RELEASE, "--namespace", namespace)

    def releases(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("list", "--all-namespaces", "--output", "json"))
        return found
