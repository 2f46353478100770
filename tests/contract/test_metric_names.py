"""Metric names cross borders: the router reads the engine's, dashboards and foreign autoscalers read them by name."""

import pytest
from prometheus_client import generate_latest
from tests.contract.engine_series import engine_registry

from kvasir_router.service.kv_metrics import parse_kv_metrics

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
    "kvasir_kv_events_published_total",
    "kvasir_engine_last_progress_timestamp_seconds",
    "kvasir_kv_cache_used_tokens",
    "kvasir_kv_cache_capacity_tokens",
    "kvasir_uncached_tokens",
    "kvasir_prefill_tokens_per_second",
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
    return generate_latest(engine_registry(tmp_path_factory.mktemp("metrics"))).decode()


@pytest.mark.parametrize("name", AGREED)
def test_the_engine_has_every_agreed_series(exposition, name):
    assert any(line.startswith(name.rstrip("{")) for line in exposition.splitlines())


def test_the_router_reads_cache_use_and_size_from_it(exposition):
    metrics = parse_kv_metrics(exposition)
    assert metrics.usage == 0.25
    assert metrics.capacity_tokens == 1600


@pytest.mark.parametrize(
    "line",
    [
        "kvasir_kv_cache_used_tokens 400",
        "kvasir_kv_cache_capacity_tokens 1600",
        "kvasir_uncached_tokens 35",
        "kvasir_prefill_tokens_per_second 50",
    ],
)
def test_the_autoscalers_series_have_the_schedulers_values(exposition, line):
    name, value = line.split()
    assert f'{name}{{model_name="model"}} {float(value)}' in exposition
