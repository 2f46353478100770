"""The benchmark of an engine's ranks runs on CPUs, at toy size: the way of a step, whole steps and pipeline stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Report = Callable[..., list[str]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs keep their model."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def report(benchmark: Callable[[str], Any], work: Path, capfd: pytest.CaptureFixture[str]) -> Report:
    """Lines that a part prints, of two sequences."""

    def run(part: str, num_ranks: int, *more: str) -> list[str]:
        flags = ("--ranks", str(num_ranks), "--batch-sizes", "2", "--rounds", "40", "--work", str(work))
        benchmark("parallel").main(["--model", "toy", "--only", part, *flags, *more])
        return capfd.readouterr().out.splitlines()

    return run


def rows(lines: list[str]) -> list[list[str]]:
    """Cells of a table behind its heading."""
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_way_of_a_step_is_timed(report: Report, num_ranks: int) -> None:
    title = f"## The way of a step of 256 decodes, {num_ranks} ranks, us (medians of 40)"
    assert report("way", num_ranks)[0] == title


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(1, []), pytest.param(2, ["2 ranks, gloo", "2 ranks, shared_memory"], marks=pytest.mark.slow)],
)
def test_a_row_of_steps_for_one_rank_and_for_each_backend_of_more(
    report: Report, num_ranks: int, ways: list[str]
) -> None:
    found = rows(report("steps", num_ranks))
    assert [row[0] for row in found] == ["one rank", *ways]
    assert all(float(milliseconds) > 0 for _, milliseconds in found)


def test_one_stage_sends_nothing(report: Report) -> None:
    [alone] = rows(report("stages", 1, "--stages", "1"))
    assert (alone[:2], alone[3]) == (["2", "1"], "0")
    assert float(alone[2]) > 0


@pytest.mark.slow
def test_two_stages_send_what_one_does_not(report: Report) -> None:
    [two] = rows(report("stages", 2, "--stages", "2"))
    assert (two[:2], float(two[3].replace(",", "")) > 0) == (["2", "2"], True)
    assert len(two[4].split(", ")) == 2
