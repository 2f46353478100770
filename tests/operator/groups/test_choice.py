"""Which groups a revision has: those that run stay, those with the least work go, names in use are not taken again."""

from collections.abc import Collection

import pytest
from tests.operator.cluster_objects import leader_worker_set, stateful_set

from kvasir_operator.groups.group import Group, chosen_indexes, kinds_by_index, staying
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET, Kind


def groups(running: Collection[int], idle: Collection[int] = ()) -> list[Group]:
    every = [(index, True) for index in running] + [(index, False) for index in idle]
    return [Group(stateful_set(index, is_running=is_running), ()) for index, is_running in every]


def name(index: int) -> str:
    return str(stateful_set(index)["metadata"]["name"])


@pytest.mark.parametrize(
    ("running", "idle", "num_wanted", "going", "taken", "expected"),
    [
        ((), (), 2, (), (), [0, 1]),
        ((0, 1), (), 2, (), (), [0, 1]),
        ((0, 1), (), 3, (), (), [0, 1, 2]),
        ((0, 1, 2), (), 2, (0,), (), [1, 2]),
        ((0, 1, 2), (), 1, (0, 2), (), [1]),
        ((0, 1, 2), (), 1, (), (), [0]),
        ((1,), (), 2, (), (), [0, 1]),
        ((1,), (), 2, (), (0,), [1, 2]),
        ((), (0, 1), 1, (), (), [0]),
        ((), (0, 1), 2, (), (0,), [1, 2]),
        ((0,), (1,), 3, (), (), [0, 1, 2]),
        ((0, 1), (), 0, (), (), []),
    ],
    ids=[
        "none yet",
        "at rest",
        "one more",
        "the least busy goes",
        "two go",
        "nobody told its work",
        "a free name is taken",
        "a name whose pods are leaving is not",
        "one that is kept comes back",
        "but not while its pods are leaving",
        "kept ones before new ones",
        "none",
    ],
)
def test_the_groups_of_a_revision(
    running: Collection[int],
    idle: Collection[int],
    num_wanted: int,
    going: Collection[int],
    taken: Collection[int],
    expected: list[int],
) -> None:
    assert chosen_indexes(groups(running, idle), num_wanted, [name(index) for index in going], taken) == expected


def test_only_those_that_run_can_stay() -> None:
    assert [group.index for group in staying(groups((2, 0), (1,)), 5, ())] == [0, 2]


SETS, LED = Group(stateful_set(0), ()), Group(leader_worker_set(0), ())


@pytest.mark.parametrize(
    ("existing", "offered", "expected"),
    [
        ([], STATEFUL_SET, [STATEFUL_SET, STATEFUL_SET]),
        ([], LEADER_WORKER_SET, [LEADER_WORKER_SET, LEADER_WORKER_SET]),
        ([SETS], LEADER_WORKER_SET, [STATEFUL_SET, STATEFUL_SET]),
        ([LED], LEADER_WORKER_SET, [LEADER_WORKER_SET, LEADER_WORKER_SET]),
        ([Group(stateful_set(1), ()), LED], LEADER_WORKER_SET, [LEADER_WORKER_SET, STATEFUL_SET]),
    ],
    ids=["none offered", "offered", "made before it was offered", "one of them", "each stays what it is"],
)
def test_what_the_groups_of_a_revision_are_made_as(existing: list[Group], offered: Kind, expected: list[Kind]) -> None:
    assert list(kinds_by_index(existing, [0, 1], offered).values()) == expected
