"""The benchmark of an engine's ranks runs on CPUs, at toy size: the way of a step, whole steps and pipeline stages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs keep their model."""
    return tmp_path_factory.mktemp("cache")


def report(cache: Path, part: str) -> list[str]:
    """Lines that a part prints, of two ranks or stages and two sequences."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "runtime"), "XDG_CACHE_HOME": str(cache)}
    flags = ("--model", "toy", "--only", part, "--ranks", "2", "--batch-sizes", "2")
    command = [sys.executable, ROOT / "benchmarks" / "parallel.py", *flags]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=cache, timeout=240
    ).stdout.splitlines()


def rows(lines: list[str]) -> list[list[str]]:
    """Cells of a table behind its heading."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def test_the_way_of_a_step_is_timed(cache: Path) -> None:
    assert report(cache, "way")[0] == "## The way of a step of 256 decodes, 2 ranks, us (medians of 2,000)"


def test_a_row_of_steps_for_one_rank_and_for_each_backend_of_two(cache: Path) -> None:
    found = rows(report(cache, "steps"))
    assert [row[0] for row in found] == ["one rank", "2 ranks, gloo", "2 ranks, shared_memory"]
    assert all(float(milliseconds) > 0 for _, milliseconds in found)


def test_two_stages_send_what_one_does_not(cache: Path) -> None:
    alone, two = rows(report(cache, "stages"))
    assert (alone[:2], two[:2]) == (["2", "1"], ["2", "2"])
    assert (alone[3], float(two[3].replace(",", "")) > 0) == ("0", True)
    assert len(two[4].split(", ")) == 2
