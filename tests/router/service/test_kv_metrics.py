import pytest

from kvasir_router.service.kv_metrics import KvMetrics, parse_kv_metrics

OURS = """# HELP kvasir_kv_cache_usage_ratio Share.
# TYPE kvasir_kv_cache_usage_ratio gauge
kvasir_kv_cache_usage_ratio 0.25
kvasir_num_requests_waiting 3.0
vllm:num_requests_waiting 3.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0
"""
TWO_CORES = """vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OURS, KvMetrics(0.25, 16_000, 3)),
        (TWO_CORES, KvMetrics(0.75, None, 5)),
        ("", KvMetrics(None, None, None)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', KvMetrics(None, None, None)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="-1"} 1.0', KvMetrics(None, None, None)),
        ("kvasir_kv_cache_usage_ratio NaN\nkvasir_num_requests_waiting NaN", KvMetrics(None, None, None)),
        ("kvasir_kv_cache_usage_ratio +Inf\nkvasir_num_requests_waiting +Inf", KvMetrics(None, None, None)),
        ("kvasir_kv_cache_usage_ratio -1\nkvasir_num_requests_waiting -1", KvMetrics(None, None, None)),
        ("kvasir_kv_cache_usage_ratio_other 1", KvMetrics(None, None, None)),
    ],
)
def test_reads_use_size_and_queue(text: str, expected: KvMetrics) -> None:
    assert parse_kv_metrics(text) == expected
