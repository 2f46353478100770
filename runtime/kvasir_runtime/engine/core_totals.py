"""Several engine cores seen as one: sums of what they say of themselves."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.requests.stats import SchedulerStats


def total_ready(cores: Sequence[EngineReady]) -> EngineReady:
    """Cores of one configuration differ in their memory only: limits are those of the first, capacities add up."""
    first = cores[0]
    if len(cores) == 1:
        return first
    return msgspec.structs.replace(
        first,
        num_blocks=sum(core.num_blocks for core in cores),
        kv_capacity_tokens=sum(core.kv_capacity_tokens for core in cores),
        startup_seconds={phase: max(core.startup_seconds[phase] for core in cores) for phase in first.startup_seconds},
    )


def total_stats(cores: Sequence[SchedulerStats]) -> SchedulerStats:
    """Counts and rates add up; the last step is the latest of all."""
    if len(cores) == 1:
        return cores[0]
    rates = [core.prefill_tokens_per_second for core in cores if core.prefill_tokens_per_second is not None]
    positions = itertools.zip_longest(*(core.num_accepted_per_position for core in cores), fillvalue=0)
    special: dict[str, Any] = {
        "last_step_time": max(core.last_step_time for core in cores),
        "num_accepted_per_position": [sum(counts) for counts in positions],
        "prefill_tokens_per_second": sum(rates) if rates else None,
        "transfers": cores[0].transfers,  # one that exchanges KV is alone (config.py)
    }
    sums: dict[str, Any] = {
        name: sum(getattr(core, name) for core in cores)
        for name in SchedulerStats.__struct_fields__
        if name not in special
    }
    return SchedulerStats(**sums, **special)
