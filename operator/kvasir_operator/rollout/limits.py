"""How far a role's pods may be from the number that is wanted while they are replaced, as a Deployment has it."""

from dataclasses import dataclass

from kvasir_operator.api.model import RolloutSpec


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
