"""What one replica can hold and compute, by the engines' own measurements."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from kvasir_operator.autoscaling.sample import ReplicaLoad, RoleSample

SATURATED_SECONDS = 10.0
"""Of prefill that wait at a replica which has more to do than it can."""
NEW_WEIGHT = 0.3
"""Of a further measurement of a saturated replica: the mix of prompts and answers changes."""


@dataclass(frozen=True)
class Capacity:
    """Of one replica; None while none has been measured."""

    kv_tokens: float
    prefill_tokens_per_second: float | None
    saturated_tokens_per_second: float | None = None
    """Prompt tokens that it computes with as many answers beside them as it holds, which take their own time."""


def capacity_of(warm: Iterable[ReplicaLoad], last: Capacity | None) -> Capacity | None:
    """The median of replicas that are warm: rates of a cold start are none of a replica's. `last` where none is."""
    replicas = [replica for replica in warm if replica.kv_capacity_tokens > 0]
    if not replicas:
        return last
    rates = [rate for replica in replicas if (rate := replica.prefill_tokens_per_second)]
    rate = median(rates) if rates else None if last is None else last.prefill_tokens_per_second
    kv_tokens = median(replica.kv_capacity_tokens for replica in replicas)
    return Capacity(kv_tokens, rate, None if last is None else last.saturated_tokens_per_second)


def is_saturated(sample: RoleSample, capacity: Capacity) -> bool:
    """Every replica has more to do than it can."""
    rate = capacity.prefill_tokens_per_second
    if rate is None or not sample.replicas:
        return False
    return all(replica.uncached_tokens >= rate * SATURATED_SECONDS for replica in sample.replicas)


def with_throughput(capacity: Capacity, sample: RoleSample, was_saturated: bool) -> Capacity:
    """`was_saturated`: for as long as the sample's rates are over. Else what was computed is what at least can be."""
    last = capacity.saturated_tokens_per_second
    if not sample.replicas or (last is None and not was_saturated):
        return capacity
    seen = sample.computed_tokens_per_second / len(sample.replicas)
    if last is None:
        return replace(capacity, saturated_tokens_per_second=seen or None)
    blended = last + NEW_WEIGHT * (seen - last) if was_saturated else last
    return replace(capacity, saturated_tokens_per_second=max(blended, seen))
