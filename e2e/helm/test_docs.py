"""The helm commands and values of the documentation, given to helm: a value that is gone is refused."""

import re
import shlex
from pathlib import Path

import pytest
from e2e.helm.helm import CHART, ROOT, Helm

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), CHART / "README.md")
TEXTS = {page: page.read_text() for page in PAGES}
VALUES = {page: re.findall(r"```yaml\n(# values\.yaml\n.*?)```", text, re.DOTALL) for page, text in TEXTS.items()}
COMMANDS = [
    (page, command.replace("\\\n", " "))
    for page, text in TEXTS.items()
    for command in re.findall(r"^(helm (?:install|upgrade) (?:.*\\\n)*.*)$", text, re.MULTILINE)
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_the_documentation_renders(offline_helm: Helm, page: Path, command: str, tmp_path: Path) -> None:
    if VALUES[page]:
        (tmp_path / "values.yaml").write_text(VALUES[page][0])
    _, _, release, *arguments = shlex.split(command)
    given = [str(tmp_path / each) if each == "values.yaml" else each for each in arguments]
    given = [str(ROOT / each) if each == "charts/kvasir" else each for each in given]
    offline_helm.run("template", release, *(each for each in given if each not in ("--wait", "--create-namespace")))


@pytest.mark.parametrize("values", [block for blocks in VALUES.values() for block in blocks])
def test_values_of_the_documentation_render(offline_helm: Helm, values: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(values)
    offline_helm.run("template", "kvasir", CHART, "--values", tmp_path / "values.yaml")


def test_the_documentation_installs_upgrades_and_tests() -> None:
    assert len(COMMANDS) == 7
    assert "helm test kvasir" in TEXTS[ROOT / "docs" / "install.md"]
    assert "helm uninstall kvasir" in TEXTS[ROOT / "docs" / "install.md"]
