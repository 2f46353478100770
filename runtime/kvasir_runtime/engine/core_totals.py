"""Several engine cores seen as one: sums of what they say of themselves."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats


def total_ready(cores: Sequence[EngineReady]) -> EngineReady:
    """Cores of one configuration differ in their memory only: other limits are those of the first, capacities add
    up."""
    first = cores[0]
    if len(cores) == 1:
        return first
    return msgspec.structs.replace(
        first,
        max_model_len=min(core.max_model_len for core in cores),
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
        "transfers": total_transfers([core.transfers for core in cores if core.transfers is not None]),
    }
    sums: dict[str, Any] = {
        name: sum(getattr(core, name) for core in cores)
        for name in SchedulerStats.__struct_fields__
        if name not in special
    }
    return SchedulerStats(**sums, **special)


def total_transfers(cores: Sequence[TransferStats]) -> TransferStats | None:
    """None: no core exchanges KV, or none has said so yet."""
    if not cores:
        return None
    counts = itertools.zip_longest(*(core.seconds_counts for core in cores), fillvalue=0)
    failures, ended = Counter[str](), Counter[str]()
    for core in cores:
        failures.update(core.num_failures)
        ended.update(core.num_offers_ended)
    return TransferStats(
        num_blocks_sent=sum(core.num_blocks_sent for core in cores),
        num_blocks_received=sum(core.num_blocks_received for core in cores),
        page_bytes=cores[0].page_bytes,
        seconds_counts=[sum(of_bucket) for of_bucket in counts],
        seconds_sum=sum(core.seconds_sum for core in cores),
        num_failures=dict(failures),
        num_offers_ended=dict(ended),
        num_leased_blocks=sum(core.num_leased_blocks for core in cores),
        num_requests_kept=sum(core.num_requests_kept for core in cores),
    )
