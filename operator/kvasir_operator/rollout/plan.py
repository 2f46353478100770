"""One step of a rollout, decided from what is observed alone; a pass over a finished one decides on what there is.

In which order revisions were used a number on each Deployment says, so that it outlives the operator, as
`deployment.kubernetes.io/revision` does; by it former ones are kept at zero for a rollback.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvasir_operator.api.model import RolloutSpec
from kvasir_operator.rollout.goal import (
    Goal,
    RoleGoal,
    RoleLimits,
    RolloutPhase,
    choose_goal,
    is_anything_served,
    role_limits,
)
from kvasir_operator.rollout.step import Replicas, grow, keep_in_step, keep_pairs, shrink
from kvasir_operator.rollout.workload import Fleet, RevisionName, RoleName, Workload, WorkloadKey, make_fleet


@dataclass(frozen=True)
class RolloutPlan:
    """Where a rollout is, and what holds next.

    traffic_weight: per cent of the requests for `revision` while it is a canary. trouble: why it is halted. number: of
    the revision, in the order of use. replicas: of every workload that stays. expired: former workloads to delete.
    """

    phase: RolloutPhase
    revision: RevisionName
    traffic_weight: int | None = None
    trouble: str | None = None
    number: int = 1
    replicas: Mapping[WorkloadKey, int] = field(default_factory=dict)
    expired: frozenset[WorkloadKey] = frozenset()


def plan_rollout(
    revision: RevisionName,
    desired: Mapping[RoleName, int],
    rollout: RolloutSpec,
    workloads: Sequence[Workload],
    blocked: str | None = None,
    *,
    is_waiting: bool = False,
) -> RolloutPlan:
    """`desired`: pods by role, over all revisions. `blocked`: why no pod of `revision` may be started. `is_waiting`:
    none should be yet."""
    fleet = make_fleet(revision, desired, workloads)
    limits = {role: role_limits(wanted, rollout) for role, wanted in desired.items()}
    goal = choose_goal(fleet, limits, rollout.canary, blocked, is_waiting=is_waiting)
    replicas = {each.key: each.replicas for each in (*fleet.current.values(), *fleet.former)}
    replicas |= _step(fleet, limits, goal.roles) | _roles_left_behind(fleet, limits, goal)
    gone = expired(fleet, rollout.history_limit)
    left = {key: number for key, number in replicas.items() if key not in gone}
    return RolloutPlan(goal.phase, revision, goal.traffic_weight, goal.trouble, current_number(fleet), left, gone)


def _step(fleet: Fleet, limits: Mapping[RoleName, RoleLimits], goals: Mapping[RoleName, RoleGoal]) -> Replicas:
    grown: Replicas = {}
    shrunk: Replicas = {}
    for role, each in limits.items():
        shrunk |= shrink(fleet, role, each, goals[role])
        grown |= grow(fleet, role, each, goals[role], shrunk)
    grown = keep_in_step(fleet, limits, grown)
    return grown | keep_pairs(fleet, limits, grown, shrunk)


def _roles_left_behind(fleet: Fleet, limits: Mapping[RoleName, RoleLimits], goal: Goal) -> Replicas:
    """Pods of roles that the spec no longer has serve on until the current revision does all by itself."""
    left_behind = {each.key: 0 for each in fleet.former if each.key.role not in limits}
    if goal.phase in (RolloutPhase.HALTED, RolloutPhase.PAUSED, RolloutPhase.WAITING):
        return {}
    is_taken_over = all(_does_all(fleet.available(fleet.current[role]), each) for role, each in limits.items())
    return left_behind if is_taken_over or not is_anything_served(fleet.former) else {}


def _does_all(num_available: int, limits: RoleLimits) -> bool:
    return num_available >= min(limits.desired, max(1, limits.min_available))


def current_number(fleet: Fleet) -> int:
    """The current revision's: above all former ones', and unchanged while that holds."""
    own = max((each.number for each in fleet.current.values()), default=0)
    highest = max((each.number for each in fleet.former), default=0)
    return own if own > highest else highest + 1


def expired(fleet: Fleet, history_limit: int) -> frozenset[WorkloadKey]:
    """Former workloads to delete: of revisions that have no pods left, all but those used last."""
    busy = {each.key.revision for each in fleet.former if not each.is_idle}
    numbers = {each.key.revision: each.number for each in fleet.former if each.key.revision not in busy}
    kept = sorted(numbers, key=lambda name: -numbers[name])[:history_limit]
    return frozenset(
        each.key for each in fleet.former if each.key.revision not in busy and each.key.revision not in kept
    )
