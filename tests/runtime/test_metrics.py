"""Rows of numbers that API processes share."""

from pathlib import Path

import pytest

from kvasir_runtime.engine.messages import SchedulerStats
from kvasir_runtime.metrics import (
    E2E,
    FINISH_REASONS,
    FINISHED,
    GENERATION_TOKENS,
    ITL,
    PROMPT_TOKENS,
    ROW_SLOTS,
    TTFT,
    EngineView,
    MetricsCollector,
    RequestMetrics,
    request_rows,
)


def test_totals_are_those_of_all_processes(tmp_path: Path) -> None:
    rows = [request_rows(tmp_path, 2) for _ in range(2)]  # each process maps the file itself
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
    rows = request_rows(tmp_path, 1)
    RequestMetrics(rows.row(0)).first_token(seconds)
    collector = MetricsCollector("tiny", rows, lambda: EngineView(ready=None, stats=None))
    [family] = [each for each in collector.collect() if each.name == "kvasir_time_to_first_token_seconds"]
    counted = [sample.labels["le"] for sample in family.samples if "le" in sample.labels and sample.value == 1]
    assert counted[0] == first_bucket


def test_speculation_is_counted_under_vllms_names_and_by_position(tmp_path: Path) -> None:
    stats = SchedulerStats(
        num_running=1,
        num_waiting=0,
        num_held=2,
        num_blocks_used=0,
        num_blocks=4,
        num_steps=5,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        last_step_time=0.0,
        num_drafts=4,
        num_draft_tokens=12,
        num_accepted_tokens=7,
        num_accepted_per_position=[4, 2, 1],
    )
    collector = MetricsCollector("tiny", request_rows(tmp_path, 1), lambda: EngineView(ready=None, stats=stats))
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert samples["kvasir_num_requests_held", None] == 2
    assert samples["kvasir_spec_decode_num_drafts_total", None] == 4
    assert samples["kvasir_spec_decode_num_draft_tokens_total", None] == 12
    assert samples["kvasir_spec_decode_num_accepted_tokens_total", None] == 7
    name = "kvasir_spec_decode_num_accepted_tokens_per_pos_total"
    assert [samples[name, position] for position in ("0", "1", "2")] == [4, 2, 1]


def test_a_prompt_counts_once_whatever_the_number_of_its_sequences(tmp_path: Path) -> None:
    rows = request_rows(tmp_path, 1)
    metrics = RequestMetrics(rows.row(0))
    metrics.prompt(7)
    metrics.first_token(0.1)
    metrics.first_token(0.1)
    assert rows.total(PROMPT_TOKENS) == 7
