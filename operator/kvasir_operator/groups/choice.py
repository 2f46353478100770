"""Which groups a revision has, given how many: those that run stay as far as they may, others get new names.

What a group is made as it stays, and so do those that are made beside it: of a revision that has none yet they are what
the cluster offers.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count

from kvasir_operator.groups.group import Group
from kvasir_operator.kube.kinds import STATEFUL_SET, Kind


@dataclass(frozen=True)
class WantedGroup:
    """`index` tells a revision's groups apart. `avoided_nodes`: where its failures began more than once. `kind`: of its
    object."""

    index: int
    avoided_nodes: tuple[str, ...] = ()
    kind: Kind = STATEFUL_SET


def staying(groups: Iterable[Group], num_wanted: int, going: Collection[str]) -> list[Group]:
    """Of the groups that run those that run on: not those whose names are among `going`, and not more than wanted."""
    running = [group for group in groups if group.is_running]
    ordered = sorted(running, key=lambda group: (group.name in going, group.index))
    return sorted(ordered[:num_wanted], key=lambda group: group.index)


def chosen_indexes(
    groups: Collection[Group], num_wanted: int, going: Collection[str], taken: Collection[int]
) -> list[int]:
    """Indexes of the groups that a revision is to have.

    `taken` have pods that are on their way out: a group of the same name would wait until those are gone.
    """
    stay = [group.index for group in staying(groups, num_wanted, going)]
    others = [group.index for group in groups if not group.is_running]
    fresh = (index for index in count() if index not in {*taken, *(group.index for group in groups)})
    free = [*(index for index in others if index not in taken), *(next(fresh) for _ in range(num_wanted))]
    return sorted([*stay, *free[: num_wanted - len(stay)]])


def kinds_by_index(groups: Iterable[Group], indexes: Iterable[int], offered: Kind) -> dict[int, Kind]:
    """Of each of `indexes`: as the group is, else as the revision's first, else what is `offered`."""
    known = {group.index: group.kind for group in groups}
    of_new = next(iter(known.values()), offered)
    return {index: known.get(index, of_new) for index in indexes}
