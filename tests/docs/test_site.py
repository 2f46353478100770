"""The site builds: no link, anchor or page of it is missing, and links of the tree become the site's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "runbooks.html").exists()
    assert not list(tmp_path.rglob("*.py"))


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("here", "link", "repository", "becomes"),
    [
        ("index.md", "[a](../charts/kvasir/RUNBOOKS.md#x)", None, "[a](runbooks.md#x)"),
        ("decisions/index.md", "[a](../routing.md)", None, "[a](../routing.md)"),
        ("benchmarks/index.md", "[a](../../docs/routing.md)", None, "[a](../routing.md)"),
        ("index.md", "[a](../Makefile)", None, "a"),
        (
            "index.md",
            "[a](../Makefile)",
            "https://git.example/kvasir",
            "[a](https://git.example/kvasir/blob/main/Makefile)",
        ),
        ("index.md", "[a](../nothing.py)", None, "[a](../nothing.py)"),
        ("index.md", "![a](architecture.svg)", None, "![a](architecture.svg)"),
        ("index.md", "[a](https://example.com/b)", None, "[a](https://example.com/b)"),
    ],
)
def test_a_link_of_the_tree_becomes_the_sites(
    hooks: ModuleType, here: str, link: str, repository: str | None, becomes: str
) -> None:
    assert hooks.with_links(link, here, repository) == becomes
