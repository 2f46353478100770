"""How far a role may be from the pods that are wanted, as Deployments round it."""

import pytest

from kvasir_operator.api.model import RolloutSpec
from kvasir_operator.rollout.goal import role_limits

TABLE: list[tuple[int, int | str, int | str, tuple[int, int]]] = [
    # desired, maxSurge, maxUnavailable, (fewest that serve, most that exist)
    (3, 1, 0, (3, 4)),
    (3, "34%", 0, (3, 5)),
    (3, "33%", 0, (3, 4)),
    (3, 0, "67%", (1, 3)),
    (3, 0, "66%", (2, 3)),
    (3, 0, "33%", (2, 3)),  # both come to 0: one may lack
    (2, 1, 5, (0, 3)),
    (4, "100%", "0%", (4, 8)),
    (0, 1, 1, (0, 0)),
]


@pytest.mark.parametrize(("desired", "surge", "unavailable", "bounds"), TABLE)
def test_surge_rounds_up_and_unavailable_rounds_down(
    desired: int, surge: int | str, unavailable: int | str, bounds: tuple[int, int]
) -> None:
    limits = role_limits(desired, RolloutSpec(surge, unavailable))
    assert (limits.min_available, limits.max_total) == bounds
