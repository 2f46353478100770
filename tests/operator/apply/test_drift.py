"""Whether a live object still holds every value that we want of it."""

from typing import Any

import pytest

from kvasir_operator.apply.drift import find_drift


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),  # defaulted by the server
        ({"a": {}, "b": [], "c": None, "d": False, "e": 0, "f": ""}, {}),  # left out by the server
        ({"args": ["x", "y"]}, {"args": ["x", "y"]}),
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
