"""The page of tools names every format that can be asked for."""

import re
from pathlib import Path

import pytest

from kvasir_runtime.talk.formats import FORMATS, REASONING

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


@pytest.mark.parametrize(("flag", "formats"), [("--tool-call-parser", FORMATS), ("--reasoning-parser", REASONING)])
def test_formats_are_those_of_the_code(flag: str, formats: dict[str, object]) -> None:
    table = PAGE[PAGE.index(f"| `{flag}` |") :].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(formats)
