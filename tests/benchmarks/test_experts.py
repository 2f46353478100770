"""The benchmark of mixtures of experts runs, at toy size, and its three ways agree."""

import pytest
from benchmarks import experts


def test_the_toy_prints_a_row_for_each_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(["--toy", "--threads", "1", "--rounds", "1"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| toy")]
    assert [row[2].strip() for row in rows] == ["1", "4"]
    assert [len(row) for row in rows] == [12, 12]
