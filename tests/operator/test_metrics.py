"""The operator's own series."""

from typing import Any

import pytest

from kvasir_operator.metrics import OperatorMetrics


def service(ready: str | None, suspend: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Degraded", "status": "True"}]
    conditions += [] if ready is None else [{"type": "Ready", "status": ready}]
    metadata = {"namespace": "models", "name": "llama"}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": {"conditions": conditions}}


def ready_series(metrics: OperatorMetrics) -> float | None:
    labels = {"service_namespace": "models", "inference_service": "llama"}
    return metrics.registry.get_sample_value("kvasir_operator_service_ready", labels)


@pytest.mark.parametrize(
    ("ready", "value"), [("True", 1.0), ("False", 0.0), ("Unknown", 0.0), pytest.param(None, None, id="no condition")]
)
def test_a_services_condition_ready_is_a_series(ready: str | None, value: float | None) -> None:
    metrics = OperatorMetrics()
    metrics.watch_service("MODIFIED", service(ready))
    assert ready_series(metrics) == value


def test_a_suspended_service_has_no_series_from_then_on() -> None:
    metrics = OperatorMetrics()
    metrics.watch_service("MODIFIED", service("False"))
    metrics.watch_service("MODIFIED", service("False", suspend=True))
    assert ready_series(metrics) is None


def test_a_service_without_status_has_no_series() -> None:
    metrics = OperatorMetrics()
    metrics.watch_service("MODIFIED", {"metadata": {"namespace": "models", "name": "llama"}, "spec": {}})
    assert ready_series(metrics) is None


def test_a_service_that_is_gone_leaves_no_series() -> None:
    metrics = OperatorMetrics()
    metrics.watch_service(None, service("True"))
    for _ in range(2):  # one that is not known is no error
        metrics.watch_service("DELETED", service("True"))
    assert ready_series(metrics) is None
