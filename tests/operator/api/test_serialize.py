"""Dataclasses back to manifests."""

from collections.abc import Callable
from typing import Any

from kvasir_operator.api.fields import as_manifest
from kvasir_operator.api.parse import parse_service


def test_what_was_written_comes_back_without_the_defaults(make_manifest: Callable[..., dict[str, Any]]) -> None:
    spec = {
        "model": {"source": "pvc://claim/x", "aliases": ["a"]},
        "engine": {"kvCache": {"blockSize": 32, "disk": {"sizeLimit": "1Gi"}}, "args": ["--x"]},
        "autoscaling": {
            "maxReplicas": 4,
            "targetKVCacheUsage": 0.5,
            "behavior": {"scaleDown": {"selectPolicy": "Min"}},
        },
        "pod": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
    }
    defaults = {"router": {"policy": "finishTime"}, "parallelism": {"tensor": 1}}

    assert as_manifest(parse_service(make_manifest(**spec, **defaults)).spec) == spec
