"""What a node's first process sees of its ranks, by a clock of its own."""

from pathlib import Path

import pytest

from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.status import NodeStatus, RankStatus


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """Ranks 2 and 3, watched."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.status = NodeStatus(folder / "ranks", Topology(pipeline_size=4, num_nodes=2).places(1), self.clock)
        self.ranks = [RankStatus(folder / "ranks", 2, index) for index in range(2)]

    def wait(self, seconds: float, *beating: int) -> str | None:
        """Beat by beat; what is seen in the end."""
        seen = self.status.silent_rank()
        for _ in range(int(seconds / BEAT_SECONDS)):
            self.clock.now += BEAT_SECONDS
            for index in beating:
                self.ranks[index].beat(0)
            seen = self.status.silent_rank()
        return seen


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def begun(node: Node) -> Node:
    for rank in node.ranks:
        rank.beat(0)
    return node


def test_a_rank_that_falls_silent_is_named(begun: Node) -> None:
    assert begun.wait(SILENT_SECONDS, 0) is None
    assert begun.wait(BEAT_SECONDS, 0) == "rank 3 has given no sign of life for 6 seconds"


def test_a_rank_that_has_not_begun_may_take_long(node: Node) -> None:
    assert node.wait(100 * SILENT_SECONDS) is None


def test_a_rank_that_speaks_again_begins_anew(begun: Node) -> None:
    begun.wait(SILENT_SECONDS, 0)
    begun.wait(BEAT_SECONDS, 0, 1)
    assert begun.wait(SILENT_SECONDS, 0) is None


def test_a_node_that_stood_still_as_a_whole_has_lost_nobody(begun: Node) -> None:
    begun.wait(BEAT_SECONDS, 0, 1)
    begun.clock.now += 3600.0
    assert begun.status.silent_rank() is None
    assert begun.wait(3 * BEAT_SECONDS) is None, "they are given a while to speak again"


def test_steps_and_readiness_are_those_of_all_ranks(begun: Node) -> None:
    begun.ranks[0].beat(7)
    begun.ranks[0].set_ready()
    assert (begun.status.num_steps, begun.status.is_ready) == ([7, 0], False)
    begun.ranks[1].set_ready()
    assert begun.status.is_ready


def test_ranks_of_several_engines_are_told_apart(tmp_path: Path) -> None:
    topologies = [Topology(pipeline_size=2, num_nodes=2, data_size=2, data_rank=data_rank) for data_rank in range(2)]
    places = [place for topology in topologies for place in topology.places(1)]
    clock = Clock()
    status = NodeStatus(tmp_path / "ranks", list(reversed(places)), clock)
    ranks = [RankStatus(tmp_path / "ranks", 2, place.local_rank) for place in places]
    ranks[0].beat(1)
    ranks[1].beat(2)
    assert (status.places, status.num_steps) == (places, [1, 2])
    status.silent_rank()
    for _ in range(6):
        clock.now += BEAT_SECONDS
        ranks[0].beat(1)
        seen = status.silent_rank()
    assert seen == "data-parallel rank 1, rank 1 has given no sign of life for 6 seconds"
