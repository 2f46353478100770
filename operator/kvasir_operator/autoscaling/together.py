"""The roles of one service together: they wake at once, and go to zero only when none of them has work."""

from collections.abc import Mapping
from dataclasses import replace

from kvasir_operator.autoscaling.behavior import Change
from kvasir_operator.autoscaling.decide import decide
from kvasir_operator.autoscaling.idle import idle_seconds, noting_idleness
from kvasir_operator.autoscaling.reasons import ScalingReason
from kvasir_operator.autoscaling.situation import Memory, RoleSituation, Verdict


def decide_together(
    situations: Mapping[str, RoleSituation], memories: Mapping[str, Memory]
) -> dict[str, tuple[Verdict, Memory]]:
    """By role, of the roles that are autoscaled; a role without a memory begins one."""
    noted = {role: noting_idleness(each, memories.get(role, Memory())) for role, each in situations.items()}
    is_idle = all(
        idle_seconds(each, noted[role]) >= each.spec.scale_to_zero_after.seconds for role, each in situations.items()
    )
    decided = {role: decide(each, noted[role], is_idle) for role, each in situations.items()}
    waking = next((verdict for verdict, _ in decided.values() if verdict.reason is ScalingReason.HELD_REQUESTS), None)
    if waking is None:
        return decided
    return {role: _woken(situations[role], *decided[role], waking) for role in situations}


def _woken(situation: RoleSituation, verdict: Verdict, memory: Memory, waking: Verdict) -> tuple[Verdict, Memory]:
    """A role that would stay at zero, for want of metrics of its own, comes along."""
    if situation.current or verdict.replicas:
        return verdict, memory
    woken = replace(verdict, replicas=max(1, situation.spec.min_replicas), reason=waking.reason, message=waking.message)
    return woken, replace(memory, changes=(*memory.changes, Change(situation.now, woken.replicas)))
