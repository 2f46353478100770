"""Objects of the Kubernetes API as its JSON has them."""

from collections.abc import Mapping
from typing import Any

KubernetesObject = Mapping[str, Any]

ObjectKey = tuple[str, str]
"""Namespace and name."""


def key_of(one: KubernetesObject) -> ObjectKey:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]
