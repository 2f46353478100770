"""The roles of one service together: none is at zero while another has work, and they go there only when none has.

What cannot be measured is taken for work, and so is a start: a role is idle from when a replica of it is ready, and not
during a rollout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvasir_operator.autoscaling.behavior import Change
from kvasir_operator.autoscaling.decide import decide, why_held
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.situation import Memory, RoleSituation, Verdict


def decide_together(
    situations: Mapping[str, RoleSituation], memories: Mapping[str, Memory]
) -> dict[str, tuple[Verdict, Memory]]:
    """By role; a role without a memory begins one."""
    noted = {role: noting_idleness(each, memories.get(role, Memory())) for role, each in situations.items()}
    is_idle = all(
        idle_seconds(each, noted[role]) >= each.spec.scale_to_zero_after.seconds for role, each in situations.items()
    )
    decided = {role: decide(each, noted[role], is_idle) for role, each in situations.items()}
    verdicts = [verdict for verdict, _ in decided.values()]
    held = next((each for each in verdicts if each.reason is ScalingReason.HELD_REQUESTS), None)
    waking = held or _busy_role(situations.values())
    if waking is None:
        return decided
    return {role: _woken(situations[role], *decided[role], waking) for role in situations}


def _busy_role(situations: Iterable[RoleSituation]) -> Verdict | None:
    """Where those that decode compute prompts too nothing is held, and the role at zero has nothing to show."""
    busy = next((each for each in situations if each.current and has_work(each)), None)
    if busy is None:
        return None
    return Verdict(busy.current, ScalingReason.OTHER_ROLE_BUSY, f"{busy.role} has work")


def _woken(situation: RoleSituation, verdict: Verdict, memory: Memory, waking: Verdict) -> tuple[Verdict, Memory]:
    """A role that would stay at zero, for want of metrics of its own, comes along."""
    if situation.current or verdict.replicas:
        return verdict, memory
    woken = replace(verdict, replicas=max(1, situation.spec.min_replicas), reason=waking.reason, message=waking.message)
    return woken, replace(memory, changes=(*memory.changes, Change(situation.now, woken.replicas)))


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
    if situation.sample is None or why_held(situation) is not None:
        return False
    sample = situation.sample.only(situation.ready)
    return sample.num_in_flight > 0 or sample.uncached_tokens_per_second > 0 or sample.requests_per_second > 0
