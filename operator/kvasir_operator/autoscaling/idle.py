"""For how long a role has had nothing to do. What cannot be measured is taken for work, and so is a start: a role is
idle from when a replica of it is ready, and not during a rollout."""

from dataclasses import replace

from kvasir_operator.autoscaling.hold import why_held
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import Memory, RoleSituation


def idle_seconds(situation: RoleSituation, memory: Memory) -> float:
    """For how long the role has had no work as far as is known; 0 while nothing is."""
    return 0.0 if memory.idle_since is None else situation.now - memory.idle_since


def noting_idleness(situation: RoleSituation, memory: Memory) -> Memory:
    """To be called with every sample, before `idle_seconds`."""
    is_starting = situation.current > 0 and not situation.ready
    is_known = situation.sample is not None and why_held(situation) is None
    if is_starting or situation.is_rolling or not is_known or has_work(situation):
        return replace(memory, idle_since=None)
    return replace(memory, idle_since=situation.now if memory.idle_since is None else memory.idle_since)


def has_work(situation: RoleSituation) -> bool:
    """As far as is known."""
    sample = situation.sample
    return sample is not None and why_held(situation) is None and is_busy(sample.only(situation.ready))


def is_busy(sample: RoleSample) -> bool:
    return sample.num_in_flight > 0 or sample.uncached_tokens_per_second > 0 or sample.requests_per_second > 0
