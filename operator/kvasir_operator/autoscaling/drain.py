"""What waits, and how long that will be so: a queue that will be gone before a further replica serves needs none."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from kvasir_operator.autoscaling.sample import RoleSample

LEAST_GROWTH_SECONDS = 10.0
"""Of each half of the time over which a queue's growth is seen: so long that one long prompt is no growth, and less
than a turn of the loop. Where scrapes are further apart it is from scrape to scrape."""
KEPT_SECONDS = 120.0


@dataclass(frozen=True)
class Backlog:
    """Prompt tokens still to be computed when a sample was taken: held in routers, and by replica. `unseen`: replicas
    that served and told nothing."""

    at: float
    held: float
    by_replica: Mapping[str, float] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()

    @property
    def tokens(self) -> float:
        return self.held + sum(self.by_replica.values())


def with_backlog(past: Sequence[Backlog], sample: RoleSample, serving: Collection[str]) -> tuple[Backlog, ...]:
    """With this sample's; one that is seen a second time counts once. `serving`: names of replicas."""
    kept = (each for each in past if sample.at - KEPT_SECONDS <= each.at < sample.at)
    by_replica = {replica.name: replica.uncached_tokens for replica in sample.replicas}
    return (*kept, Backlog(sample.at, sample.held_tokens, by_replica, frozenset(serving) - by_replica.keys()))


def backlog_growth(backlogs: Sequence[Backlog]) -> float:
    """Tokens a second since the moment before the last but one; 0 where none is known.

    At most twice that of either half: a batch that came at once is in one of them alone, and is no growth.
    """
    *_, last = backlogs
    middle = _before(last, backlogs)
    first = middle and _before(middle, backlogs)
    if middle is None or first is None:
        return 0.0
    return min(_growth(first, last), 2 * _growth(first, middle), 2 * _growth(middle, last))


def is_waited_for(backlogs: Sequence[Backlog], sample: RoleSample, own_seconds: float) -> bool:
    """Whether prompts stay for longer than their own prefill takes, `own_seconds` on average: by Little's law, tokens
    that are there at a time over those that arrive. Where they do not, no further replica makes them stay less."""
    recent = [each for each in backlogs if each.at > sample.at - sample.window_seconds]
    tokens = fmean(each.tokens for each in recent)
    return tokens > sample.uncached_tokens_per_second * own_seconds


def _before(later: Backlog, backlogs: Sequence[Backlog]) -> Backlog | None:
    """The latest from which on a growth until `later` is seen."""
    return next((each for each in reversed(backlogs) if later.at - each.at >= LEAST_GROWTH_SECONDS), None)


def _growth(first: Backlog, last: Backlog) -> float:
    """Of routers and of replicas that both moments know; those that served only later had nothing."""
    known = last.by_replica.keys() - first.unseen
    grown = sum(last.by_replica[name] - first.by_replica.get(name, 0.0) for name in known)
    return (last.held - first.held + grown) / (last.at - first.at)


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
