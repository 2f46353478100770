"""The helm commands of docs/install.md and of the chart's README, given to helm: a value that is gone is refused."""

import re
import shlex
from pathlib import Path

import pytest
from e2e.helm.helm import CHART, ROOT, Helm

PAGES = (ROOT / "docs" / "install.md", CHART / "README.md")
INSTALL = PAGES[0].read_text()
COMMANDS = [
    command.replace("\\\n", " ")
    for page in PAGES
    for command in re.findall(r"^(helm (?:install|upgrade) (?:.*\\\n)*.*)$", page.read_text(), re.MULTILINE)
]
VALUES = re.findall(r"```yaml\n(# values\.yaml\n.*?)```", INSTALL, re.DOTALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_renders(offline_helm: Helm, command: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(VALUES[0])
    _, _, release, *arguments = shlex.split(command)
    given = [str(tmp_path / each) if each == "values.yaml" else each for each in arguments]
    given = [str(ROOT / each) if each == "charts/kvasir" else each for each in given]
    offline_helm.run("template", release, *(each for each in given if each not in ("--wait", "--create-namespace")))


@pytest.mark.parametrize("values", VALUES)
def test_values_of_the_documentation_render(offline_helm: Helm, values: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(values)
    offline_helm.run("template", "kvasir", CHART, "--values", tmp_path / "values.yaml")


def test_the_documentation_installs_upgrades_and_tests() -> None:
    assert len(COMMANDS) == 6
    assert "helm test kvasir" in INSTALL
    assert "helm uninstall kvasir" in INSTALL
