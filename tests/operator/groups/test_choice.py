"""Which groups a revision has: those that run stay, those with the least work go, names in use are not taken again."""

from collections.abc import Collection

import pytest
from tests.operator.cluster_objects import stateful_set

from kvasir_operator.groups.choice import chosen_indexes, staying
from kvasir_operator.groups.group import Group


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
