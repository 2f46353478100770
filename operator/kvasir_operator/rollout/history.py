"""In which order revisions were used, and how many former ones are kept at zero for a rollback.

The number stands on each Deployment, so it outlives the operator, as `deployment.kubernetes.io/revision` does.
"""

from kvasir_operator.rollout.workload import Fleet, WorkloadKey


def current_number(fleet: Fleet) -> int:
    """The current revision's: above all former ones', and unchanged while that holds."""
    own = max((each.number for each in fleet.current.values()), default=0)
    highest = max((each.number for each in fleet.former), default=0)
    return own if own > highest else highest + 1


def expired(fleet: Fleet, history_limit: int) -> frozenset[WorkloadKey]:
    """Former workloads to delete: of revisions that have no pods left, all but those used last.

    A Deployment of all revisions (number 0), as earlier operators made it, cannot be rolled back to.
    """
    busy = {each.key.revision for each in fleet.former if not each.is_idle}
    numbers = {each.key.revision: each.number for each in fleet.former if each.key.revision not in busy}
    kept = sorted((name for name in numbers if numbers[name] > 0), key=lambda name: -numbers[name])[:history_limit]
    return frozenset(
        each.key for each in fleet.former if each.key.revision not in busy and each.key.revision not in kept
    )
