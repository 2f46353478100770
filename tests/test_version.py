"""One version: that of `pyproject.toml`, wherever it is repeated."""

import importlib
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("program", ["operator", "router", "runtime"])
def test_a_program_says_which_version_it_is(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"kvasir_{program}.cli").main
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{VERSION}\n"), "stale metadata? run `make setup`"


def test_the_chart_is_of_this_version_and_takes_images_of_it() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "kvasir" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
