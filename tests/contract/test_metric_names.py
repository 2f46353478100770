"""Metric names cross borders: the router reads the engine's, dashboards and foreign autoscalers read them by name."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvasir_router.kv_metrics import parse_kv_metrics
from kvasir_runtime.engine.messages import EngineReady, SchedulerStats
from kvasir_runtime.metrics import EngineView, MetricsCollector, SharedRows

AGREED = [
    "kvasir_num_requests_running",
    "kvasir_num_requests_waiting",
    "kvasir_kv_cache_usage_ratio",
    "kvasir_time_to_first_token_seconds_bucket",
    "kvasir_inter_token_latency_seconds_bucket",
    "kvasir_e2e_request_latency_seconds_bucket",
    "kvasir_prefix_cache_queries_total",
    "kvasir_prefix_cache_hits_total",
    "kvasir_prompt_tokens_total",
    "kvasir_generation_tokens_total",
    'kvasir_num_preemptions_total{mode="recompute"',
    "kvasir_engine_steps_total",
    "kvasir_engine_last_progress_timestamp_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
]


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What an engine's /metrics says in the middle of some work."""
    stats = SchedulerStats(
        num_running=2, num_waiting=1, num_blocks_used=25, num_blocks=100, num_steps=9, num_preemptions=1,
        num_prefix_queries=40, num_prefix_hits=8, last_step_time=1.0,
    )  # fmt: skip
    ready = EngineReady(
        max_model_len=64, vocab_size=10, num_blocks=100, block_size=16, device="cpu", attention_backend="cpu",
        startup_seconds={},
    )  # fmt: skip
    rows = SharedRows(Path(tmp_path_factory.mktemp("metrics")) / "rows", 1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector("model", rows, lambda: EngineView(ready=ready, stats=stats)))
    return generate_latest(registry).decode()


@pytest.mark.parametrize("name", AGREED)
def test_the_engine_has_every_agreed_series(exposition, name):
    assert any(line.startswith(name.rstrip("{")) for line in exposition.splitlines())


def test_the_router_reads_cache_use_and_size_from_it(exposition):
    metrics = parse_kv_metrics(exposition)
    assert metrics.usage == 0.25
    assert metrics.capacity_tokens == 1600
