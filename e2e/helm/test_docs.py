"""The helm commands and values of the documentation, given to helm: a value that is gone is refused."""

import re
import shlex
from pathlib import Path

import pytest
from e2e.helm.helm import ROOT, Helm
from tests.docs.commands import PAGES, Command, documented

VALUES = {
    str(page.relative_to(ROOT)): re.findall(r"```yaml\n(# values\.yaml\n.*?)```", page.read_text(), re.DOTALL)
    for page in PAGES
}
INSTALL = "docs/install.md"
"""Its values are those of pages that show none."""


@pytest.mark.parametrize("command", [*documented("helm install "), *documented("helm upgrade ")], ids=str)
def test_a_command_of_the_documentation_renders(offline_helm: Helm, command: Command, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text((VALUES.get(command.page) or VALUES[INSTALL])[0])
    _, _, release, *arguments = shlex.split(command.text)
    given = [str(tmp_path / each) if each == "values.yaml" else each for each in arguments]
    given = [str(ROOT / each) if each == "charts/kvasir" else each for each in given]
    offline_helm.run("template", release, *(each for each in given if each not in ("--wait", "--create-namespace")))


@pytest.mark.parametrize("values", [block for blocks in VALUES.values() for block in blocks])
def test_values_of_the_documentation_render(offline_helm: Helm, values: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(values)
    offline_helm.run("template", "kvasir", ROOT / "charts" / "kvasir", "--values", tmp_path / "values.yaml")
