"""Rows of numbers that API processes share."""

from pathlib import Path

import msgspec
import pytest

from kvasir_runtime import request_metrics
from kvasir_runtime.metrics import EngineView, MetricsCollector
from kvasir_runtime.parallel.counts import CollectiveCounts, CollectiveTotals
from kvasir_runtime.request_metrics import (
    GENERATION_TOKENS,
    PROMPT_TOKENS,
    ROW_SLOTS,
    Histogram,
    RequestMetrics,
    request_rows,
    status_slot,
)
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats

STATS = SchedulerStats(
    num_running=1,
    num_waiting=0,
    num_blocks_used=0,
    num_blocks=4,
    num_steps=5,
    num_preemptions=0,
    num_prefix_queries=0,
    num_prefix_hits=0,
    last_step_time=0.0,
)


def test_totals_are_those_of_all_processes(tmp_path: Path) -> None:
    rows = [request_rows(tmp_path, 2) for _ in range(2)]  # each process maps the file itself
    for index in range(2):
        RequestMetrics(rows[index].row(index)).next_tokens(5 + index, 0.1)
    assert [each.total(GENERATION_TOKENS) for each in rows] == [11, 11]


def test_no_two_series_share_a_slot() -> None:
    named = [each for each in vars(request_metrics).values() if isinstance(each, Histogram)]
    histograms = [slot for each in (*named, *request_metrics.HTTP) for slot in range(each.start, each.sum_slot + 1)]
    routes = range(len(request_metrics.HTTP_METHODS))
    statuses = [status_slot(route, each) for route in routes for each in request_metrics.STATUS_CLASSES]
    finished = range(request_metrics.FINISHED, request_metrics.FINISHED + len(request_metrics.FINISH_REASONS))
    counters = [PROMPT_TOKENS, request_metrics.CACHED_TOKENS, GENERATION_TOKENS, *finished]
    assert sorted([*counters, *statuses, *histograms]) == list(range(ROW_SLOTS))


@pytest.mark.parametrize(
    ("seconds", "first_bucket"), [(0.0005, "0.001"), (0.001, "0.001"), (0.0011, "0.005"), (1e9, "+Inf")]
)
def test_value_falls_into_the_bucket_that_it_does_not_exceed(tmp_path: Path, seconds: float, first_bucket: str) -> None:
    rows = request_rows(tmp_path, 1)
    RequestMetrics(rows.row(0)).first_tokens(1, seconds)
    collector = MetricsCollector("tiny", rows, lambda: EngineView(ready=None, stats=None))
    [family] = [each for each in collector.collect() if each.name == "kvasir_time_to_first_token_seconds"]
    counted = [sample.labels["le"] for sample in family.samples if "le" in sample.labels and sample.value == 1]
    assert counted[0] == first_bucket


def test_speculation_is_counted_under_vllms_names_and_by_position(tmp_path: Path) -> None:
    stats = msgspec.structs.replace(
        STATS,
        num_held=2,
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


def test_transfers_are_shown_by_direction_and_reason_zeros_included(tmp_path: Path) -> None:
    transfers = TransferStats(
        num_blocks_sent=2,
        num_blocks_received=3,
        page_bytes=100,
        seconds_counts=[1] + [0] * 14 + [1],
        seconds_sum=61.0,
        num_failures={"checksum": 4},
        num_offers_ended={"pulled": 5},
        num_leased_blocks=6,
    )
    stats = msgspec.structs.replace(STATS, transfers=transfers)
    collector = MetricsCollector("tiny", request_rows(tmp_path, 1), lambda: EngineView(ready=None, stats=stats))
    samples = {
        (sample.name.removeprefix("kvasir_kv_transfer_"), *list(sample.labels.values())[1:]): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    assert (samples["blocks_total", "sent"], samples["blocks_total", "received"]) == (2, 3)
    assert (samples["bytes_total", "sent"], samples["bytes_total", "received"]) == (200, 300)
    assert (samples["failures_total", "checksum"], samples["failures_total", "lease"]) == (4, 0)
    assert (samples["leases_ended_total", "pulled"], samples["leases_ended_total", "expired"]) == (5, 0)
    assert samples["leased_blocks",] == 6
    assert (samples["seconds_bucket", "0.001"], samples["seconds_bucket", "60.0"]) == (1, 1)
    assert (samples["seconds_count",], samples["seconds_sum",]) == (2, 61.0)


def test_an_engine_that_exchanges_nothing_shows_no_transfers(tmp_path: Path) -> None:
    collector = MetricsCollector("tiny", request_rows(tmp_path, 1), lambda: EngineView(ready=None, stats=STATS))
    assert not any("kv_transfer" in family.name for family in collector.collect())


def test_a_prompt_counts_once_whatever_the_number_of_its_sequences(tmp_path: Path) -> None:
    rows = request_rows(tmp_path, 1)
    metrics = RequestMetrics(rows.row(0))
    metrics.began(7, 3)
    metrics.first_tokens(1, 0.1)
    metrics.first_tokens(1, 0.1)
    assert rows.total(PROMPT_TOKENS) == 7


@pytest.mark.parametrize(("num_cores", "shown"), [(1, {}), (2, {"0": 3.0, "1": 4.0})])
def test_ranks_are_told_apart_where_there_are_several(tmp_path: Path, num_cores: int, shown: dict[str, float]) -> None:
    cores = [
        SchedulerStats(
            num_running=3 + core, num_waiting=0, num_blocks_used=0, num_blocks=4, num_steps=5, num_preemptions=0,
            num_prefix_queries=0, num_prefix_hits=0, last_step_time=0.0,
        )
        for core in range(num_cores)
    ]  # fmt: skip
    view = EngineView(ready=None, stats=cores[0], stats_by_core=cores)
    collector = MetricsCollector("tiny", request_rows(tmp_path, 1), lambda: view)
    running = {
        sample.labels["data_parallel_rank"]: sample.value
        for family in collector.collect()
        if family.name == "kvasir_data_parallel_num_requests"
        for sample in family.samples
        if sample.labels["state"] == "running"
    }
    assert running == shown


def test_what_ranks_exchange_is_shown_by_group_and_operation_over_all_engines(tmp_path: Path) -> None:
    written = CollectiveTotals(tmp_path, 2)
    counts = CollectiveCounts()
    for num_bytes in (100, 20):
        counts.count("all_reduce", num_bytes)
    written.write(0, [{"tensor": counts}, {"tensor": counts}])  # two ranks
    written.write(1, [{"tensor": counts, "pipeline": counts}])
    read = CollectiveTotals(tmp_path, 2)  # another process
    view = EngineView(ready=None, stats=None)
    collector = MetricsCollector("tiny", request_rows(tmp_path, 1), lambda: view, read)
    shown = {
        (sample.name, sample.labels["group"], sample.labels["op"]): sample.value
        for family in collector.collect()
        if family.name.startswith("kvasir_parallel")
        for sample in family.samples
    }
    calls, sizes = "kvasir_parallel_collectives_total", "kvasir_parallel_collective_bytes_total"
    assert shown == {
        (calls, "tensor", "all_reduce"): 6,
        (calls, "pipeline", "all_reduce"): 2,
        (sizes, "tensor", "all_reduce"): 360,
        (sizes, "pipeline", "all_reduce"): 120,
    }
