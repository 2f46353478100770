"""Which rank does what."""

import pytest

from kvasir_runtime.parallel.topology import RankPlace, Topology

TWO_BY_THREE = Topology(tensor_size=2, pipeline_size=3, num_nodes=3)


@pytest.mark.parametrize(
    ("rank", "tensor_rank", "pipeline_rank", "local_rank", "tensor_group"),
    [(0, 0, 0, 0, [0, 1]), (3, 1, 1, 1, [2, 3]), (4, 0, 2, 0, [4, 5])],
)
def test_tensor_ranks_are_neighbours(
    rank: int, tensor_rank: int, pipeline_rank: int, local_rank: int, tensor_group: list[int]
) -> None:
    place = RankPlace(TWO_BY_THREE, rank)
    assert (place.tensor_rank, place.pipeline_rank) == (tensor_rank, pipeline_rank)
    assert (place.local_rank, list(place.tensor_group)) == (local_rank, tensor_group)


def test_the_first_tensor_rank_of_the_last_stage_reports() -> None:
    assert [place.rank for place in TWO_BY_THREE.places() if place.is_reporter] == [TWO_BY_THREE.reporter] == [4]


def test_a_nodes_ranks_are_its_run() -> None:
    assert [place.rank for place in TWO_BY_THREE.places(node=1)] == [2, 3]


def test_a_tensor_group_over_two_nodes_shares_no_memory() -> None:
    assert all(place.tensor_group_shares_a_node for place in TWO_BY_THREE.places())
    assert not any(place.tensor_group_shares_a_node for place in Topology(tensor_size=4, num_nodes=2).places())


def test_engines_of_one_machine_have_devices_of_their_own() -> None:
    second = Topology(tensor_size=2, data_size=3, data_rank=1)
    assert [place.local_rank for place in second.places()] == [2, 3]
    assert second.local_world_size == 6


@pytest.mark.parametrize(
    ("num_nodes", "sizes", "nodes"),
    [
        (1, (1, 2, 2), [[0, 0], [0, 0]]),
        (2, (1, 2, 2), [[0, 1], [0, 1]]),  # a stage of all engines
        (4, (1, 2, 2), [[0, 2], [1, 3]]),  # a stage of one
        (2, (2, 2, 2), [[0, 0, 1, 1], [0, 0, 1, 1]]),
        (4, (2, 2, 2), [[0, 0, 2, 2], [1, 1, 3, 3]]),
        (8, (2, 2, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (2, (2, 1, 4), [[0, 0], [0, 0], [1, 1], [1, 1]]),
        (2, (1, 1, 2), [[0], [1]]),
    ],
)
def test_a_node_has_a_stage_of_as_many_engines_as_it_has_room_for(
    num_nodes: int, sizes: tuple[int, int, int], nodes: list[list[int]]
) -> None:
    """`sizes`: tensor, pipeline, data; `nodes` of each engine's ranks."""
    tensor, pipeline, data = sizes
    topologies = [
        Topology(tensor_size=tensor, pipeline_size=pipeline, num_nodes=num_nodes, data_size=data, data_rank=data_rank)
        for data_rank in range(data)
    ]
    assert [[place.node for place in topology.places()] for topology in topologies] == nodes


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 6, 12])
def test_each_rank_of_a_node_has_a_device_of_its_own(num_nodes: int) -> None:
    topologies = [
        Topology(tensor_size=2, pipeline_size=2, num_nodes=num_nodes, data_size=3, data_rank=data_rank)
        for data_rank in range(3)
    ]
    for node in range(num_nodes):
        local = [place.local_rank for topology in topologies for place in topology.places(node)]
        assert sorted(local) == list(range(topologies[0].local_world_size))


def test_ranks_of_several_engines_are_named_apart() -> None:
    assert Topology().places()[0].name == "rank 0"
    assert Topology(data_size=2, data_rank=1).places()[0].name == "data-parallel rank 1, rank 0"
