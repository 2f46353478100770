"""Whether a live object still holds every value that we want of it."""

from decimal import Decimal
from typing import Any

import pytest

from kvasir_operator.apply.drift import find_drift, parse_quantity


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),  # defaulted by the server
        ({"a": {}, "b": [], "c": None, "d": False, "e": 0, "f": ""}, {}),  # left out by the server
        ({"args": ["x", "y"]}, {"args": ["x", "y"]}),
        ({"limits": {"cpu": "1000m", "memory": "1024Mi"}}, {"limits": {"cpu": "1", "memory": "1Gi"}}),
        ({"emptyDir": {"sizeLimit": "0.5Gi"}}, {"emptyDir": {"sizeLimit": "512Mi"}}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B"}, {"name": "A", "value": "1"}]}),
        ({"ports": [{"containerPort": 80}]}, {"ports": [{"containerPort": 80, "protocol": "TCP"}]}),
    ],
)
def test_what_the_server_fills_in_or_rewrites_is_no_drift(desired: Any, live: Any) -> None:
    assert find_drift(desired, live) == []


@pytest.mark.parametrize(
    ("desired", "live", "paths"),
    [
        ({"spec": {"replicas": 2}}, {"spec": {"replicas": 5}}, ["spec.replicas"]),
        ({"spec": {"replicas": 0}}, {"spec": {"replicas": 5}}, ["spec.replicas"]),
        ({"labels": {"a": "x"}}, {}, ["labels"]),
        ({"args": ["x"]}, {"args": ["x", "--evil"]}, ["args"]),
        ({"args": ["x", "y"]}, {"args": ["y", "x"]}, ["args[0]", "args[1]"]),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, ["limits.cpu"]),
        ({"labels": {"a": "1000m"}}, {"labels": {"a": "1"}}, ["labels.a"]),
        (
            {"containers": [{"name": "engine", "image": "a"}]},
            {"containers": [{"name": "sidecar"}, {"name": "engine", "image": "b"}]},
            ["containers[engine].image"],
        ),
        ({"containers": [{"name": "engine"}]}, {"containers": []}, ["containers[engine]"]),
        ({"hostNetwork": False}, {"hostNetwork": True}, ["hostNetwork"]),
    ],
)
def test_a_changed_or_missing_value_is_named_by_its_path(desired: Any, live: Any, paths: list[str]) -> None:
    assert find_drift(desired, live) == paths


@pytest.mark.parametrize(
    ("text", "value"),
    [("8Gi", Decimal(8 * 2**30)), ("500m", Decimal("0.5")), (2, Decimal(2)), ("1e3", Decimal(1000)), ("a", None)],
)
def test_quantities_are_read_as_kubernetes_writes_them(text: Any, value: Decimal | None) -> None:
    assert parse_quantity(text) == value
