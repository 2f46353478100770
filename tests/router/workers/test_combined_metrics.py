"""Several workers' series, read as Prometheus would."""

from prometheus_client.parser import text_string_to_metric_families

from kvasir_router.fleet_series import FleetSeries
from kvasir_router.metrics import Metrics
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.series import DemandCollector, KvEventCollector, ServiceCollector
from kvasir_router.workers.admin import combined


def exposition(num_requests: int, num_ready: int = 2) -> str:
    metrics = Metrics()
    for _ in range(num_requests):
        metrics.in_flight.inc()
        metrics.count_end('a "model"', 200, 0.3, 0.0)
        metrics.in_flight.inc()
    metrics.observe_endpoints(lambda state: num_ready if state is EndpointState.READY else 0)
    return metrics.render().decode()


def samples(*expositions: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and the labels' values."""
    families = text_string_to_metric_families(combined(expositions).decode())
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


def test_counts_gauges_and_buckets_are_added_up() -> None:
    found = samples(exposition(1), exposition(2))
    assert found["kvasir_router_requests_total", ("200", 'a "model"')] == 3
    assert found["kvasir_router_in_flight", ()] == 3
    assert found["kvasir_router_request_duration_seconds_bucket", ("0.25", 'a "model"')] == 0
    assert found["kvasir_router_request_duration_seconds_bucket", ("0.5", 'a "model"')] == 3
    assert found["kvasir_router_request_duration_seconds_count", ('a "model"',)] == 3


def test_engines_that_all_see_are_counted_once() -> None:
    found = samples(exposition(0, num_ready=2), exposition(0, num_ready=3))
    assert found["kvasir_router_endpoints", ("ready",)] == 3


def test_one_worker_alone_tells_what_it_tells() -> None:
    alone = exposition(2)
    told = {
        (one.name, tuple(one.labels.values())): one.value
        for family in text_string_to_metric_families(alone)
        for one in family.samples
        if not one.name.endswith("_created")
    }
    assert samples(alone) == told


def test_no_worker_tells_nothing() -> None:
    assert combined([]) == b""


def test_of_every_gauge_it_is_known_whether_all_workers_see_the_same() -> None:
    metrics = Metrics()
    for observe in (metrics.observe_queue, metrics.observe_bodies, metrics.observe_connections):
        observe(lambda: 0)
    metrics.observe_ejected(lambda: 0)
    metrics.observe_endpoints(lambda state: 0)
    metrics.add(DemandCollector(lambda: {"s": {}}))
    metrics.add(ServiceCollector(()))
    metrics.add(KvEventCollector(lambda: ()))
    gauges = {
        family.name
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.type == "gauge" and not family.name.endswith("_created")
    }
    held_by_each = {
        "in_flight", "queue_depth", "service_queue_depth", "queued_requests", "queued_tokens", "held_body_bytes",
        "connections",
    }  # fmt: skip
    assert gauges == set(FleetSeries) | {f"kvasir_router_{name}" for name in held_by_each}
