"""What an engine says of its load, published over ZMQ. The fields' order is that of the message."""

from collections.abc import Collection
from dataclasses import dataclass, replace

REPORT_LIFETIME_SECONDS = 3.0
"""An engine that has work reports every second: after so long it is silent, and its last word counts no more."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int  # prompt tokens still to be computed of requests that have not started
    running_uncached_tokens: int  # the same of requests whose prefill has begun
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps_per_second: float
    prefill_tokens_per_second: float | None  # None until it has prefilled anything
    arrived: tuple[str, ...]  # x-request-ids received since the last report
    instance: str  # of the engine's process: another one has an empty cache
    data_parallel_size: int = 1  # ranks of the engine, each of which publishes for itself
    # Of rank 0's side channel, that of rank r being r higher. None: it does not exchange cached prefixes with others.
    kv_transfer_port: int | None = None

    @property
    def only_decodes(self) -> bool:
        is_prefilling = self.num_waiting or self.waiting_uncached_tokens or self.running_uncached_tokens
        return bool(self.num_running and self.steps_per_second and not is_prefilling)

    def holds(self, age_seconds: float) -> bool:
        """What has no work may be silent."""
        return age_seconds <= REPORT_LIFETIME_SECONDS or not (self.num_running or self.num_waiting)


def of_all_ranks(report: LoadReport, others: Collection[LoadReport]) -> LoadReport:
    """One rank's report, with the load of the engine's other ranks added."""
    ranks = (report, *others)
    rates = [rank.prefill_tokens_per_second for rank in ranks if rank.prefill_tokens_per_second is not None]
    return replace(
        report,
        num_running=sum(rank.num_running for rank in ranks),
        num_waiting=sum(rank.num_waiting for rank in ranks),
        waiting_uncached_tokens=sum(rank.waiting_uncached_tokens for rank in ranks),
        running_uncached_tokens=sum(rank.running_uncached_tokens for rank in ranks),
        kv_used_tokens=sum(rank.kv_used_tokens for rank in ranks),
        kv_capacity_tokens=sum(rank.kv_capacity_tokens for rank in ranks),
        steps_per_second=sum(rank.steps_per_second for rank in ranks),
        prefill_tokens_per_second=sum(rates) if rates else None,
    )
