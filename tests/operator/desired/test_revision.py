"""The revision changes with what shapes an engine pod, and with nothing else."""

from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired import revision_of

MakeService = Callable[..., InferenceService]


def test_is_ten_hex_digits_and_the_same_each_time(make_service: MakeService) -> None:
    revision = revision_of(make_service())

    assert len(revision) == 10
    assert int(revision, 16) >= 0
    assert revision_of(make_service()) == revision


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 5},
        {"router": {"policy": "roundRobin", "replicas": 3}},
        {"rollout": {"maxSurge": 2}},
        {"engine": {"dtype": "auto"}},
        {"autoscaling": {"maxReplicas": 2}},
    ],
)
def test_stays_when_no_pod_changes(make_service: MakeService, spec: dict[str, Any]) -> None:
    assert revision_of(make_service(**spec)) == revision_of(make_service())


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": "file:///other"}},
        {"engine": {"dtype": "float16"}},
        {"resources": {"memory": "1Gi"}},
        {"pod": {"image": "mine:2"}},
        {"rollout": {"drainTimeout": "10s"}},
        {"parallelism": {"tensor": 2}},
        {"monitoring": {"podMonitor": "none"}},
        {"disaggregation": {"prefill": {}, "decode": {"resources": {"cpu": 2}}}},
    ],
)
def test_changes_with_the_pod(make_service: MakeService, spec: dict[str, Any]) -> None:
    assert revision_of(make_service(**spec)) != revision_of(make_service())
