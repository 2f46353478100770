"""How far a role goes at once where little may go."""

from kvasir_operator.rollout.goal import RoleGoal, RoleLimits
from kvasir_operator.rollout.step import shrink
from kvasir_operator.rollout.workload import Workload, WorkloadKey, make_fleet


def workload(revision: str, number: int, replicas: int, num_ready: int) -> Workload:
    """Pods that are not ready were once."""
    return Workload(WorkloadKey("serve", revision), number, replicas, num_pods=replicas, num_ready=num_ready)


def test_of_pods_that_were_ready_once_no_more_go_over_all_former_revisions_than_there_are_to_spare() -> None:
    oldest, older, current = workload("a", 1, 2, 0), workload("b", 2, 2, 0), workload("c", 3, 3, 3)
    fleet = make_fleet("c", {"serve": 4}, [oldest, older, current])
    limits = RoleLimits(desired=4, max_surge=3, max_unavailable=0)
    assert shrink(fleet, "serve", limits, RoleGoal(current=3, former=0)) == {oldest.key: 0, older.key: 1}
