"""What vLLM's own dashboards ask has an answer here: its old board of twelve panels, and the four of today.

The expressions are written anew, one a panel: the same series, labels and bounds of histograms. Panels of what vLLM
itself only shows when asked to (lifetimes of blocks, KV in memory or files of the host) are left out.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.dashboards.prometheus import Graphed, Prometheus, Range, backfill, running_prometheus
from tests.runtime.server.conftest import running_server

from kvasir_runtime.transfer.metrics import TransferStats

OVER = Range(1_790_000_000.0, 1_790_000_090.0, 10.0)
ONE = 'model_name="tiny",engine="0"'


def quantile(series: str) -> str:
    return f"histogram_quantile(0.95, sum by (le) (rate({series}_bucket{{{ONE}}}[1m])))"


def mean(series: str) -> str:
    return f"rate({series}_sum{{{ONE}}}[1m]) / rate({series}_count{{{ONE}}}[1m])"


def share_within(series: str, bound: str) -> str:
    return f'sum(rate({series}_bucket{{{ONE},le="{bound}"}}[1m])) / sum(rate({series}_count{{{ONE}}}[1m]))'


OLD = [
    quantile("vllm:e2e_request_latency_seconds"),
    f"rate(vllm:prompt_tokens_total{{{ONE}}}[1m]) + rate(vllm:generation_tokens_total{{{ONE}}}[1m])",
    quantile("vllm:inter_token_latency_seconds"),
    f"vllm:num_requests_running{{{ONE}}} + vllm:num_requests_waiting{{{ONE}}}",
    quantile("vllm:time_to_first_token_seconds"),
    f"vllm:kv_cache_usage_perc{{{ONE}}}",
    f"sum by (le) (increase(vllm:request_prompt_tokens_bucket{{{ONE}}}[1m]))",
    f"sum by (le) (increase(vllm:request_generation_tokens_bucket{{{ONE}}}[1m]))",
    f"sum by (finished_reason) (increase(vllm:request_success_total{{{ONE}}}[1m]))",
    f"rate(vllm:request_queue_time_seconds_sum{{{ONE}}}[1m])",
    f"rate(vllm:request_prefill_time_seconds_sum{{{ONE}}}[1m])",
    f"rate(vllm:request_decode_time_seconds_sum{{{ONE}}}[1m])",
    f"rate(vllm:request_max_num_generation_tokens_sum{{{ONE}}}[1m])",
]
OVERVIEW = [
    *(f'rate(vllm:request_success_total{{{ONE},finished_reason="{reason}"}}[1m])'
      for reason in ("stop", "length", "abort", "error", "repetition")),
    *(f'sum(rate(http_requests_total{{handler="{handler}",method="POST",status="{status}"}}[1m]))'
      for handler in ("/v1/chat/completions", "/v1/completions") for status in ("2xx", "4xx", "5xx")),
    "histogram_quantile(0.9, sum by (le, handler) (rate(http_request_duration_seconds_bucket[1m])))",
    *(quantile(f"vllm:{name}_seconds") for name in
      ("request_queue_time", "request_time_per_output_token", "request_prefill_time", "request_decode_time")),
    *(f'vllm:num_requests_waiting_by_reason{{{ONE},reason="{reason}"}}' for reason in ("capacity", "deferred")),
    f"rate(vllm:num_preemptions_total{{{ONE}}}[1m])",
    *(f"rate(vllm:{which}_hits_total{{{ONE}}}[1m]) / rate(vllm:{which}_queries_total{{{ONE}}}[1m])"
      for which in ("prefix_cache", "external_prefix_cache", "mm_cache")),
    quantile("vllm:iteration_tokens_total"),
    *(f'rate(vllm:prompt_tokens_by_source_total{{{ONE},source="{source}"}}[1m])'
      for source in ("local_compute", "local_cache_hit", "external_kv_transfer")),
    mean("vllm:request_prompt_tokens"),
    mean("vllm:request_generation_tokens"),
    *(share_within("vllm:time_to_first_token_seconds", bound)
      for bound in ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")),
    *(share_within("vllm:request_time_per_output_token_seconds", bound)
      for bound in ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5")),
]  # fmt: skip
INSTANCES = [
    "time() - process_start_time_seconds",
    "rate(process_cpu_seconds_total[1m])",
    "process_resident_memory_bytes",
    "process_open_fds / process_max_fds",
    "sum by (num_gpu_blocks, block_size, cache_dtype, gpu_memory_utilization) (vllm:cache_config_info)",
    'vllm:cache_config_info{enable_prefix_caching="True",prefix_caching_hash_algo=~".+",num_cpu_blocks="0"}',
    'vllm:cache_config_info{kv_offloading_backend=~".+",kv_offloading_size="0"}',
    "vllm:lora_requests_info{max_lora=~\".+\"}",
    *(f'vllm:engine_sleep_state{{{ONE},sleep_state="{state}"}}' for state in
      ("awake", "weights_offloaded", "discard_all")),
]  # fmt: skip
KV_CACHE = [
    f"rate(vllm:prompt_tokens_cached_total{{{ONE}}}[1m])",
    *(f'rate(vllm:prompt_tokens_cached_by_source_total{{{ONE},source="{source}"}}[1m])'
      for source in ("device", "host", "p2p", "disk", "external_unspecified")),
    quantile("vllm:request_prefill_kv_computed_tokens"),
    *(f'vllm:num_requests_kv_fetch_by_stage{{{ONE},stage="{stage}"}}' for stage in
      ("waiting_to_start", "in_progress", "completed_waiting")),
    quantile("vllm:nixl_xfer_time_seconds"),
    f"rate(vllm:nixl_num_failed_transfers_total{{{ONE}}}[1m])",
    f"rate(vllm:nixl_num_kv_expired_reqs_total{{{ONE}}}[1m])",
]  # fmt: skip
DRAFTS = "vllm:spec_decode_num"
SPEC_DECODE = [
    f"rate({DRAFTS}_accepted_tokens_total{{{ONE}}}[1m]) / rate({DRAFTS}_draft_tokens_total{{{ONE}}}[1m])",
    f"1 + rate({DRAFTS}_accepted_tokens_total{{{ONE}}}[1m]) / rate({DRAFTS}_drafts_total{{{ONE}}}[1m])",
    f'rate({DRAFTS}_accepted_tokens_per_pos_total{{{ONE},position="0"}}[1m])',
]
VARIABLES = [("model_name", "tiny"), ("engine", "0")]


@pytest.fixture(scope="module")
def prometheus(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped, ten times, an engine that has answered, refused, drafted and pulled KV."""
    folder = tmp_path_factory.mktemp("prometheus")
    with running_server(model_folder, tmp_path_factory.mktemp("ipc")) as running:
        running.client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4)
        running.http.post("/v1/chat/completions", json={"messages": []})
        transfers = TransferStats(num_blocks_received=2, seconds_counts=[1] + [0] * 15)
        running.core.tell_stats(num_drafts=2, num_accepted_per_position=[1], transfers=transfers)
        deadline = time.monotonic() + 30
        while "nixl" not in (text := running.http.get("/metrics").text):
            assert time.monotonic() < deadline, text
    backfill(scrapes(text), folder)
    with running_prometheus(folder) as prometheus:
        yield prometheus


def scrapes(text: str) -> Iterator[Graphed]:
    """Every sample grows by one a scrape, so that rates and quantiles have something to say."""
    times = [OVER.start + OVER.step * number for number in range(10)]
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels, "__name__": sample.name}
            yield Graphed(labels, [(at, sample.value + number) for number, at in enumerate(times)])


@pytest.mark.parametrize("expression", [*OLD, *OVERVIEW, *INSTANCES, *KV_CACHE, *SPEC_DECODE])
def test_a_panel_draws(prometheus: Prometheus, expression: str) -> None:
    assert any(series.has_a_value for series in prometheus.graph(expression, OVER))


@pytest.mark.parametrize(("label", "value"), VARIABLES)
def test_a_variable_has_values(prometheus: Prometheus, label: str, value: str) -> None:
    assert value in prometheus.labels(label, "vllm:num_requests_running")
