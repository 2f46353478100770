"""Rows of numbers that API processes share."""

from pathlib import Path

import pytest

from kvasir_runtime.metrics import (
    E2E,
    FINISH_REASONS,
    FINISHED,
    GENERATION_TOKENS,
    ITL,
    ROW_SLOTS,
    TTFT,
    EngineView,
    MetricsCollector,
    RequestMetrics,
    SharedRows,
)


def test_totals_are_those_of_all_processes(tmp_path: Path) -> None:
    rows = [SharedRows(tmp_path / "rows", 2) for _ in range(2)]  # each process maps the file itself
    for index in range(2):
        RequestMetrics(rows[index].row(index)).generated(5 + index)
    assert [each.total(GENERATION_TOKENS) for each in rows] == [11, 11]


def test_no_two_series_share_a_slot() -> None:
    histograms = [slot for each in (TTFT, ITL, E2E) for slot in range(each.start, each.end)]
    slots = [*range(FINISHED + len(FINISH_REASONS)), *histograms]
    assert slots == list(range(ROW_SLOTS))


@pytest.mark.parametrize(
    ("seconds", "first_bucket"), [(0.0005, "0.001"), (0.001, "0.001"), (0.0011, "0.005"), (1e9, "+Inf")]
)
def test_value_falls_into_the_bucket_that_it_does_not_exceed(tmp_path: Path, seconds: float, first_bucket: str) -> None:
    rows = SharedRows(tmp_path / "rows", 1)
    RequestMetrics(rows.row(0)).first_token(seconds, num_prompt_tokens=1)
    collector = MetricsCollector("tiny", rows, lambda: EngineView(ready=None, stats=None))
    [family] = [each for each in collector.collect() if each.name == "kvasir_time_to_first_token_seconds"]
    counted = [sample.labels["le"] for sample in family.samples if "le" in sample.labels and sample.value == 1]
    assert counted[0] == first_bucket
