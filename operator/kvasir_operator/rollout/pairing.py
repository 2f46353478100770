"""Prefill and decode of a revision move together: neither is of use without the other.

A role of the current revision is never more than one pod of another role ahead, by its share of the pods wanted; and
the last pod of a former revision's role stays until those of its other roles go too.
"""

from collections.abc import Mapping

from kvasir_operator.rollout.limits import RoleLimits
from kvasir_operator.rollout.step import Replicas
from kvasir_operator.rollout.workload import Fleet, RoleName


def keep_in_step(fleet: Fleet, limits: Mapping[RoleName, RoleLimits], grown: Replicas) -> Replicas:
    """`grown` without what runs ahead of the current revision's other roles."""
    reached = {role: grown.get(each.key, each.replicas) for role, each in fleet.current.items()}
    capped = dict(grown)
    for role, workload in fleet.current.items():
        others = [each for each in fleet.current if each != role and limits[each].desired]
        if workload.key in grown and others:
            # In whole numbers: the least of the others' (reached + 1) / desired, times the pods wanted, rounded up.
            cap = min(-(-limits[role].desired * (reached[each] + 1) // limits[each].desired) for each in others)
            capped[workload.key] = max(workload.replicas, min(grown[workload.key], cap))
    return capped


def keep_pairs(fleet: Fleet, limits: Mapping[RoleName, RoleLimits], grown: Replicas, shrunk: Replicas) -> Replicas:
    """`shrunk` without taking a role's last pod of a former revision whose other roles still have some.

    One that fails is of no use to them; and where the current revision waits for that pod's room, having none of the
    role at all, it goes all the same.
    """
    kept = dict(shrunk)
    for workload in fleet.former:
        role, revision = workload.key
        current = fleet.current.get(role)
        is_last = shrunk.get(workload.key) == 0 and workload.num_expendable < workload.replicas
        if not is_last or current is None or not limits[role].desired:
            continue
        others = [each for each in fleet.former if each.key.revision == revision and each.key.role != role]
        has_partner = any(shrunk.get(each.key, each.replicas) for each in others)
        if has_partner and grown.get(current.key, current.replicas) > 0:
            kept[workload.key] = 1
    return kept
