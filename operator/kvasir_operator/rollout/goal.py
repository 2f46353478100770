"""What a rollout aims at for now: how many pods the current revision and the former ones are to have.

Straight on, all pods are to be the current revision's. It is held back until it has shown that its pods become ready,
while pods of it are in trouble, and at its share of a canary; former revisions then make up what is wanted. How far a
role may be from that number while its pods are replaced, its limits say, as a Deployment's do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvasir_operator.api.model import CanarySpec, RolloutSpec
from kvasir_operator.rollout.workload import Fleet, RoleName, Workload


@dataclass(frozen=True)
class RoleLimits:
    """Counted over all revisions of the role."""

    desired: int
    max_surge: int
    max_unavailable: int

    @property
    def max_total(self) -> int:
        return self.desired + self.max_surge

    @property
    def min_available(self) -> int:
        return self.desired - self.max_unavailable

    @property
    def max_replaced(self) -> int:
        """Pods that may be between two revisions at a time."""
        return max(1, self.max_surge + self.max_unavailable)


def role_limits(desired: int, rollout: RolloutSpec) -> RoleLimits:
    """A share of the desired pods rounds up for surge and down for unavailable; where both come to 0, one may lack."""
    if desired == 0:
        return RoleLimits(0, 0, 0)
    surge = _resolved(rollout.max_surge, desired, rounds_up=True)
    unavailable = min(desired, _resolved(rollout.max_unavailable, desired, rounds_up=False))
    return RoleLimits(desired, surge, unavailable if surge or unavailable else 1)


def _resolved(value: int | str, desired: int, rounds_up: bool) -> int:
    if isinstance(value, int):
        return value
    hundredths = int(value.removesuffix("%")) * desired
    return -(-hundredths // 100) if rounds_up else hundredths // 100


class RolloutPhase(StrEnum):
    COMPLETE = "Complete"
    """No pods of former revisions are left."""
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    """The current revision has its canary's share until `pause` is lifted."""
    WAITING = "Waiting"
    """Former revisions serve until it is this service's turn."""
    HALTED = "Halted"
    """Pods of the current revision are in trouble, or it cannot run: former revisions go on serving."""


@dataclass(frozen=True)
class RoleGoal:
    """Pods of one role; `former` over all former revisions."""

    current: int
    former: int


@dataclass(frozen=True)
class Goal:
    phase: RolloutPhase
    roles: Mapping[RoleName, RoleGoal]
    traffic_weight: int | None = None
    """Per cent of the requests for the current revision; None: its part by the router's policy."""
    trouble: str | None = None
    """Why it is halted."""


def choose_goal(
    fleet: Fleet,
    limits: Mapping[RoleName, RoleLimits],
    canary: CanarySpec | None,
    blocked: str | None,
    *,
    is_waiting: bool = False,
) -> Goal:
    """`blocked`: why no pod of the current revision may be started. `is_waiting`: none should be yet."""
    straight_on = {role: RoleGoal(each.desired, 0) for role, each in limits.items()}
    if not fleet.has_former_pods or not any(each.desired for each in limits.values()):
        phase = RolloutPhase.PROGRESSING if fleet.has_former_pods else RolloutPhase.COMPLETE
        # Nor of a former revision that is kept at zero: its Services are gone, and no router would find the pods.
        nothing = {role: RoleGoal(0, 0) for role in limits}
        return Goal(phase, straight_on if blocked is None else nothing)
    all_former = {role: RoleGoal(0, each.desired) for role, each in limits.items()}
    if blocked is not None:
        return Goal(RolloutPhase.HALTED, all_former, trouble=blocked)
    if not is_anything_served(fleet.former):
        return Goal(RolloutPhase.PROGRESSING, straight_on)
    if is_waiting:
        return Goal(RolloutPhase.WAITING, all_former)
    weight = canary.weight if canary is not None and canary.pause and not _is_past_canary(fleet) else None
    trouble = next((each.trouble for each in fleet.current.values() if each.trouble is not None), None)
    held = {role: _held_back(fleet, role, each, weight) for role, each in limits.items()}
    if trouble is not None:
        return Goal(RolloutPhase.HALTED, held, weight, trouble)
    if not any(map(fleet.available, fleet.current.values())):
        return Goal(RolloutPhase.PROGRESSING, held, weight)
    if weight is not None:
        shares = {role: _canary_share(each, weight) for role, each in limits.items()}
        return Goal(RolloutPhase.PAUSED, shares, weight)
    return Goal(RolloutPhase.PROGRESSING, straight_on)


def is_anything_served(former: Iterable[Workload]) -> bool:
    """Or could be again: a pod that was ready once may come back by itself."""
    return any(min(each.replicas, each.num_pods) > each.num_useless for each in former)


def _is_past_canary(fleet: Fleet) -> bool:
    """A revision that serves without a weight was let go on already, or is what a canary is rolled back to."""
    return any(each.num_ready and each.traffic_weight is None for each in fleet.current.values())


def _held_back(fleet: Fleet, role: RoleName, limits: RoleLimits, weight: int | None) -> RoleGoal:
    """As many as may be replaced at a time, and never fewer than there are; former pods that serve all stay."""
    workload = fleet.current[role]
    first = limits.max_replaced if weight is None else min(limits.max_replaced, _num_tried(limits, weight))
    current = min(limits.desired, max(workload.replicas, first))
    num_former = sum(each.replicas for each in fleet.former_of(role))
    missing = limits.desired - fleet.available(workload)
    return RoleGoal(current, min(limits.max_total - current, max(missing, min(limits.desired, num_former))))


def _canary_share(limits: RoleLimits, weight: int) -> RoleGoal:
    """Enough pods of either side for its share of the requests, as far as surge allows it; one of each if it can be."""
    current = min(_num_tried(limits, weight), max(1, limits.max_total - 1))
    rest = -(-(100 - weight) * limits.desired // 100)
    return RoleGoal(current, min(limits.max_total - current, rest))


def _num_tried(limits: RoleLimits, weight: int) -> int:
    return -(-weight * limits.desired // 100)
