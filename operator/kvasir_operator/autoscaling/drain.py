"""What waits, and how long that will be so: a queue that will be gone before a further replica serves needs none."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvasir_operator.autoscaling.sample import RoleSample

GROWTH_SECONDS = 30.0
"""Over which a queue's growth is seen: so long that one long prompt is no growth, and shorter than rates are over."""


@dataclass(frozen=True)
class Backlog:
    """Prompt tokens still to be computed when a sample was taken: held in routers, and by replica."""

    at: float
    held: float
    by_replica: Mapping[str, float] = field(default_factory=dict)


def with_backlog(past: Sequence[Backlog], sample: RoleSample) -> tuple[Backlog, ...]:
    """With this sample's; one that is seen a second time counts once."""
    kept = (each for each in past if sample.at - GROWTH_SECONDS <= each.at < sample.at)
    by_replica = {replica.name: replica.uncached_tokens for replica in sample.replicas}
    return (*kept, Backlog(sample.at, sample.held_tokens, by_replica))


def backlog_growth(backlogs: Sequence[Backlog]) -> float:
    """Tokens a second, of routers and of replicas that both ends know; 0 where only one moment is known."""
    first, last = backlogs[0], backlogs[-1]
    if last.at == first.at:
        return 0.0
    both = first.by_replica.keys() & last.by_replica.keys()
    grown = last.held - first.held + sum(last.by_replica[name] - first.by_replica[name] for name in both)
    return grown / (last.at - first.at)


def uncached_tokens(sample: RoleSample) -> float:
    return sample.held_tokens + sum(replica.uncached_tokens for replica in sample.replicas)


def queued_tokens(sample: RoleSample, ttft_seconds: float | None) -> float:
    """Prompt tokens that wait; what is under way at any moment, within the SLO, is no queue."""
    return max(0.0, uncached_tokens(sample) - sample.uncached_tokens_per_second * (ttft_seconds or 0.0))


def drain_seconds(sample: RoleSample) -> float:
    """Until what waits is worked off as it was lately; infinite while it grows."""
    worked_off = sample.computed_tokens_per_second - sample.uncached_tokens_per_second
    return uncached_tokens(sample) / worked_off if worked_off > 0 else math.inf


def is_passing(
    sample: RoleSample, ttft_seconds: float | None, queued_at: float | None, now: float, startup_seconds: float
) -> bool:
    """Whether times to the first token are those of a queue that ends by itself. `queued_at`: when one was seen.

    For a window after a queue has gone, and as long as they are, those that were in it are among them.
    """
    if ttft_seconds is None:
        return False
    if queued_tokens(sample, ttft_seconds):
        return drain_seconds(sample) <= startup_seconds
    seen_seconds = sample.window_seconds + (sample.time_to_first_token_p90 or 0.0)
    return queued_at is not None and now - queued_at < seen_seconds


def queue_ahead(
    queued: float, arriving: float, rate: float, num_serving: int, starting: Sequence[float], ahead_seconds: float
) -> float:
    """Prompt tokens that will wait in `ahead_seconds` if they go on arriving as now.

    `rate`: of one replica; `starting`: seconds until each of those on their way serves.
    """
    serving_seconds = num_serving * ahead_seconds + sum(max(0.0, ahead_seconds - each) for each in starting)
    return max(0.0, queued + arriving * ahead_seconds - rate * serving_seconds)
