"""The page of clients lists each script that tries one, with the versions that are installed for it."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from tests.clients.environments import HERE, scripts
from tests.clients.page import Row, rows

REPORTED = re.compile(r"^ *(?:await )?report\((.*?)\)", re.DOTALL | re.MULTILINE)


def test_every_script_has_a_row() -> None:
    assert sorted(row.script for row in rows()) == sorted(script.name for script in scripts())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.client)
def test_a_row_names_what_its_script_tries(row: Row) -> None:
    reported = REPORTED.findall((HERE / row.script).read_text())[-1]
    assert tuple(name.replace("_", " ") for name in re.findall(r"\w+", reported)) == row.features


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.client)
def test_a_row_has_the_version_that_is_installed(row: Row) -> None:
    assert pins((HERE / row.script).parent)[row.client] == row.version


@cache
def pins(folder: Path) -> dict[str, str]:
    if (lock := folder / "package-lock.json").exists():
        packages = json.loads(lock.read_text())["packages"]
        return {path.removeprefix("node_modules/"): each["version"] for path, each in packages.items() if path}
    return dict(line.split("==") for line in (folder / "requirements.txt").read_text().split())
