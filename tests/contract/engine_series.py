"""An engine's series in the middle of some work, for tests of the names and values that others read."""

from pathlib import Path

from prometheus_client import CollectorRegistry

from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.metrics import EngineView, MetricsCollector
from kvasir_runtime.request_metrics import request_rows
from kvasir_runtime.requests.stats import SchedulerStats


def engine_registry(folder: Path) -> CollectorRegistry:
    """25 of 100 blocks of 16 tokens are in use; `folder` takes the API processes' rows."""
    stats = SchedulerStats(
        num_running=2, num_waiting=1, num_blocks_used=25, num_blocks=100, num_steps=9, num_preemptions=1,
        num_prefix_queries=40, num_prefix_hits=8, last_step_time=1.0, kv_used_tokens=400, waiting_uncached_tokens=30,
        running_uncached_tokens=5, prefill_tokens_per_second=50.0,
    )  # fmt: skip
    ready = EngineReady(
        max_model_len=64, max_num_seqs=4, vocab_size=10, num_blocks=100, block_size=16, device="cpu",
        attention_backend="cpu", startup_seconds={}, kv_capacity_tokens=1600,
    )  # fmt: skip
    registry = CollectorRegistry(auto_describe=False)
    rows = request_rows(folder, 1)
    registry.register(MetricsCollector("model", rows, lambda: EngineView(ready=ready, stats=stats)))
    return registry
