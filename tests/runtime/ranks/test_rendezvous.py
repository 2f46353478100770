"""Who is awaited where an engine's ranks come together, and when that is said."""

import pytest

from kvasir_runtime.parallel.meeting_point import MEETING_TIMEOUT
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.rendezvous import WARNING_SECONDS, Rendezvous


@pytest.fixture
def rendezvous() -> Rendezvous:
    """Of three nodes with two ranks each, of which those of node 0 have come."""
    rendezvous = Rendezvous(Topology(tensor_size=2, pipeline_size=3, num_nodes=3), "10.0.0.1:29500")
    rendezvous.come(0)
    rendezvous.come(1)
    return rendezvous


def test_a_node_that_does_not_come_is_named_with_what_to_check(rendezvous: Rendezvous) -> None:
    rendezvous.come(2)
    rendezvous.come(3)
    rendezvous.pass_time(WARNING_SECONDS)
    assert rendezvous.warning() == (
        "after 30 seconds node 2 (ranks 4, 5) did not come; check that each runs with its --node-rank and else with "
        "node 0's flags, that it reaches 10.0.0.1:29500 and all other ports of node 0, and that KVASIR_ROUTER_SECRET "
        "is the same on all nodes, or set on none; its own log says more"
    )


def test_a_node_has_come_when_all_its_ranks_have(rendezvous: Rendezvous) -> None:
    for rank in (2, 3, 5):
        rendezvous.come(rank)
    assert "node 2 (ranks 4) did not come" in str(rendezvous.missing())
    rendezvous.come(4)
    assert rendezvous.missing() is None


def test_it_is_said_again_and_again_and_not_at_once(rendezvous: Rendezvous) -> None:
    rendezvous.pass_time(WARNING_SECONDS - 0.1)
    assert rendezvous.warning() is None
    rendezvous.pass_time(0.1)
    assert "node 1 (ranks 2, 3) and node 2 (ranks 4, 5)" in str(rendezvous.warning())
    assert rendezvous.warning() is None
    rendezvous.pass_time(WARNING_SECONDS)
    assert rendezvous.warning() is not None


def test_hope_ends_when_ranks_give_up_waiting_for_each_other(rendezvous: Rendezvous) -> None:
    rendezvous.pass_time(MEETING_TIMEOUT.total_seconds() - 1)
    assert rendezvous.problem() is None
    rendezvous.pass_time(1)
    assert rendezvous.problem() == rendezvous.missing() is not None


def test_all_there_is_no_problem_however_long_it_goes_on(rendezvous: Rendezvous) -> None:
    for rank in range(2, 6):
        rendezvous.come(rank)
    rendezvous.pass_time(10 * MEETING_TIMEOUT.total_seconds())
    assert (rendezvous.warning(), rendezvous.problem()) == (None, None)


def test_own_ranks_are_not_looked_for_in_the_network() -> None:
    rendezvous = Rendezvous(Topology(tensor_size=2), "127.0.0.1:29500")
    rendezvous.come(0)
    rendezvous.pass_time(WARNING_SECONDS)
    assert rendezvous.warning() == (
        "after 30 seconds node 0 (ranks 1) did not come; the ranks of node 0 are processes of its own, and its log "
        "says what they wait for"
    )


def test_of_several_engines_each_looks_for_its_own_ranks_where_they_are() -> None:
    second = Rendezvous(Topology(tensor_size=2, pipeline_size=2, num_nodes=4, data_size=2, data_rank=1), "n0:29500")
    second.come(0)
    assert "node 1 (ranks 1) and node 3 (ranks 2, 3) did not come" in str(second.missing())
