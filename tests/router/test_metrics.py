"""Counts of failures are there before the first one: Prometheus sees no increase in a series that begins with 1."""

import pytest

from kvasir_router.metrics import Metrics

REASONS = ["connect", "lost", "broken", "unresponsive", "timeout", "late"]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("name", ["upstream_errors", "retries", "remote_prefill_errors"])
def test_failures_count_from_zero(name: str, reason: str) -> None:
    assert f'kvasir_router_{name}_total{{reason="{reason}"}} 0.0' in Metrics().render().decode()


@pytest.mark.parametrize("reason", REASONS)
def test_failures_of_a_revision_count_from_zero_once_it_has_answered_and_go_with_it(reason: str) -> None:
    metrics = Metrics()
    metrics.revision_requests("new", "200").inc()
    line = f'kvasir_router_revision_upstream_errors_total{{reason="{reason}",revision="new"}} 0.0'
    assert line in metrics.render().decode()
    metrics.forget_revision("new")
    assert line not in metrics.render().decode()
    metrics.revision_requests("new", "200").inc()
    assert line in metrics.render().decode()
