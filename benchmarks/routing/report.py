"""What an engine of the simulation publishes of its load."""

from benchmarks.routing.engine import Engine

from kvasir_router.service.load_report import LoadReport


def report_of(engine: Engine, arrived: tuple[str, ...], now: float) -> LoadReport:
    return LoadReport(
        num_running=engine.num_running,
        num_waiting=len(engine.waiting),
        waiting_uncached_tokens=engine.waiting_uncached_tokens,
        running_uncached_tokens=engine.running_uncached_tokens(now),
        kv_used_tokens=engine.kv_used_tokens,
        kv_capacity_tokens=engine.model.kv_capacity_tokens,
        steps_per_second=engine.recent_steps_per_second,
        prefill_tokens_per_second=engine.prefill_tokens_per_second,
        arrived=arrived,
        instance="0",
        kv_transfer_port=5600,
    )
