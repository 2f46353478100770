"""How far one role may go towards its goal at once, without more pods or fewer serving ones than its limits say.

The rules are those of Kubernetes' Deployments over their ReplicaSets: pods that are about to be made or to go count
already, pods that are not ready go first, and pods that serve go only while enough others do.

Prefill and decode of a revision move together, since neither is of use without the other: a role of the current
revision is never more than one pod of another role ahead, by its share of the pods wanted; and the last pod of a former
revision's role stays until those of its other roles go too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir_operator.rollout.goal import RoleGoal, RoleLimits
from kvasir_operator.rollout.workload import Fleet, RoleName, Workload, WorkloadKey

Replicas = dict[WorkloadKey, int]


def room(workloads: Sequence[Workload], limits: RoleLimits, shrunk: Replicas) -> int:
    """Pods that may be added: a pod that goes still counts, unless no node has it and its whole workload goes."""
    left = {**{each.key: each.replicas for each in workloads}, **shrunk}
    held = (each.num_held for each in workloads if left[each.key] or not each.has_only_unbound_pods)
    return max(0, limits.max_total - sum(held))


def grow(fleet: Fleet, role: RoleName, limits: RoleLimits, goal: RoleGoal, shrunk: Replicas) -> Replicas:
    """What is to grow, the current revision first; of the former ones that which serves most.

    `shrunk`: what goes in the same step.
    """
    current, former = fleet.current[role], fleet.former_of(role)
    free = room([current, *former], limits, shrunk)
    grown: Replicas = {}
    if (more := min(free, goal.current - current.replicas)) > 0:
        grown[current.key] = current.replicas + more
        free -= more
    missing = goal.former - sum(each.replicas for each in former)
    if former and (more := min(free, missing)) > 0:
        grown[former[-1].key] = former[-1].replicas + more
    return grown


def shrink(fleet: Fleet, role: RoleName, limits: RoleLimits, goal: RoleGoal) -> Replicas:
    """What is to shrink, former revisions first; of each side pods that do not serve before those that do."""
    current, former = fleet.current[role], fleet.former_of(role)
    sides = [_Side(former, goal.former), _Side([current], goal.current)]
    workloads = [*former, current]
    kept = [each for side in sides if side.surplus <= 0 for each in side.workloads]
    num_kept_waiting = sum(each.replicas - fleet.available(each) for each in kept)
    spare = sum(each.replicas for each in workloads) - limits.min_available - num_kept_waiting
    spare_serving = sum(map(fleet.available, workloads)) - limits.min_available
    left = {each.key: each.replicas for each in workloads}
    for side in sides:
        surplus = max(0, side.surplus)
        for each in side.workloads:
            num_waiting = each.replicas - fleet.available(each)
            cut = min(surplus, max(each.num_expendable, min(num_waiting, spare)))
            surplus, spare, left[each.key] = surplus - cut, spare - cut, left[each.key] - cut
        for each in side.workloads:
            cut = max(0, min(surplus, left[each.key], spare_serving))
            surplus, spare_serving, left[each.key] = surplus - cut, spare_serving - cut, left[each.key] - cut
    return {each.key: left[each.key] for each in workloads if left[each.key] < each.replicas}


@dataclass(frozen=True)
class _Side:
    """The current revision's workload, or those of former revisions, and how many pods they are to have."""

    workloads: Sequence[Workload]
    goal: int

    @property
    def surplus(self) -> int:
        return sum(each.replicas for each in self.workloads) - self.goal


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
