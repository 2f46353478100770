"""Situations of one role: one replica of 1000 KV tokens and 100 prompt tokens a second where nothing else is said."""

from dataclasses import replace
from typing import Any

from kvasir_operator.api.model import SLO, AutoscalingSpec
from kvasir_operator.api.quantity import Duration
from kvasir_operator.autoscaling.capacity import Capacity
from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample
from kvasir_operator.autoscaling.situation import Memory, RoleSituation

NOW = 1_000_000.0
CAPACITY = Capacity(1000, 100)


def load(name: str, kv: float = 0, **changes: Any) -> ReplicaLoad:
    return replace(ReplicaLoad(name, kv, 1000, kv, 0, 0, 0, 100), **changes)


def sample(*kv: float, **changes: Any) -> RoleSample:
    """Of replicas pod-0, pod-1, ... with so many KV tokens in use each."""
    replicas = tuple(load(f"pod-{index}", tokens) for index, tokens in enumerate(kv))
    return replace(RoleSample(NOW, replicas), **changes)


def spec(least: int = 1, most: int = 100, **changes: Any) -> AutoscalingSpec:
    return replace(AutoscalingSpec(most, least, target_kv_cache_usage=0.5), **changes)


def slo(ttft: str | None = None, itl: str | None = None) -> SLO:
    return SLO(Duration(ttft) if ttft else None, Duration(itl) if itl else None)


def situation(*kv: float, **changes: Any) -> RoleSituation:
    """All replicas are there and have served for long; `current` may say that more are on their way."""
    ready = {f"pod-{index}": 1000.0 for index in range(len(kv))}
    made = RoleSituation("serve", spec(), NOW, len(kv), ready, sample(*kv))
    return replace(made, **changes)


KNOWN = Memory(capacity=CAPACITY)
