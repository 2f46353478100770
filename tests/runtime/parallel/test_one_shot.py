"""Short sums go in one shot where that was measured faster, all others another way; every rank chooses alike."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.rank_threads import meet_all
from torch import Tensor
from torch.distributed import FileStore

from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.parallel.collectives import SingleRank
from kvasir_runtime.parallel.groups import RankGroups, meet
from kvasir_runtime.parallel.meeting_point import LOOPBACK
from kvasir_runtime.parallel.one_shot import (
    SIZES,
    OneShotCollectives,
    OneShotSum,
    SumSeconds,
    agreed_collectives,
    limit_bytes,
)
from kvasir_runtime.parallel.topology import RankPlace, Topology

LIMIT = 4096


@pytest.mark.parametrize(
    ("one_shot", "expected"),
    [
        ((5, 6, 7, 8), 0),
        ((4, 6, 7, 8), 2048),
        ((4, 4, 5, 4), 4096),  # where it is the faster again it was luck
        ((4, 4, 4, 4), 16384),
        ((), 0),
    ],
)
def test_one_shot_takes_messages_up_to_where_it_is_not_the_faster(one_shot: tuple[int, ...], expected: int) -> None:
    measured = [SumSeconds(2048 << index, 5.0, seconds) for index, seconds in enumerate(one_shot)]
    assert limit_bytes(reversed(measured)) == expected


class Recorded(SingleRank):
    """What it is asked for; sums are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: list[int] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.counts.count("all_reduce", x.nbytes)
        self.summed.append(x.nbytes)
        return torch.ones_like(x)


def twos(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return torch.full_like(x, 2)


@pytest.mark.parametrize(
    ("x", "way"),
    [
        (torch.zeros(2, LIMIT // 4, dtype=torch.bfloat16), 2),
        (torch.zeros(LIMIT // 4), 2),
        (torch.zeros(4, 2).T, 2),
        (torch.zeros(LIMIT // 4 + 4), 1),
        (torch.zeros(3), 1),  # twelve bytes
        (torch.zeros(8, dtype=torch.float16), 1),
        (torch.zeros(0, 8), 1),
    ],
)
def test_a_message_goes_the_way_of_its_size_and_type(x: Tensor, way: int) -> None:
    plain = Recorded()
    ends = OneShotCollectives(plain, twos, LIMIT)
    total = ends.all_reduce(x)
    assert total.shape == x.shape
    assert (total == way).all()
    assert len(plain.summed) == (way == 1)
    assert (ends.counts.calls[0], ends.counts.num_bytes[0]) == (1, x.nbytes)


def test_where_it_is_never_the_faster_all_sums_go_the_plain_way() -> None:
    plain = Recorded()
    OneShotCollectives(plain, twos, 0).all_reduce(torch.zeros(4))
    assert plain.summed == [16]


def test_what_is_no_sum_goes_the_plain_way(tmp_path: Path) -> None:
    plain = [rank.tensor for rank in meet_all(Topology(tensor_size=2), tmp_path)]

    def run(end: Any) -> tuple[Tensor, Tensor]:
        own = OneShotCollectives(end, twos, LIMIT)
        x = torch.full((2,), float(own.rank))
        return own.all_gather(x, 0), own.broadcast(x, 1)

    with ThreadPoolExecutor(2) as threads:
        for gathered, sent in threads.map(run, plain):
            assert gathered.tolist() == [0, 0, 1, 1]
            assert sent.tolist() == [1, 1]


def test_ranks_that_meet_agree_on_the_least_that_any_measured(tmp_path: Path) -> None:
    measured = [[SumSeconds(1024, 5.0, 4.0)], [SumSeconds(1024, 5.0, 4.0), SumSeconds(2048, 5.0, 4.0)]]

    def agree(rank: RankGroups) -> str:
        return agreed_collectives(rank.tensor, twos, measured[rank.place.tensor_rank], rank.least_of_stage).name

    with ThreadPoolExecutor(2) as threads:
        names = set(threads.map(agree, meet_all(Topology(tensor_size=2), tmp_path)))
    assert names == {"gloo, sums of up to 1024 bytes in one shot"}


def test_ranks_of_two_nodes_are_refused(tmp_path: Path) -> None:
    place, store = RankPlace(Topology(tensor_size=2, num_nodes=2), 0), FileStore(str(tmp_path / "sums"), 2)
    with pytest.raises(ConfigurationError, match="one_shot needs tensor groups of one node; use nccl"):
        meet(place, store, LOOPBACK, torch.device("cpu"), "one_shot")


def test_cpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nccl and one_shot need GPUs"):
        meet_all(Topology(tensor_size=2), tmp_path, "one_shot")


def test_torch_without_a_device_says_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="use nccl, since the GPUs cannot map each other's memory"):
        OneShotSum("no-device", FileStore(str(tmp_path / "sums"), 1), 0, 1, torch.device("cpu"))


def part_of(rank: int, num_bytes: int) -> Tensor:
    return torch.randn(num_bytes // 2, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def sums_on_gpu(rank: int, folder: Path, sender: Connection) -> None:
    """Of every size that is measured, each in a graph and outside; torch lets ranks share a GPU where it is told to."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    one_shot = OneShotSum("test", FileStore(str(folder / "meeting"), 2), rank, 2, device)
    sums = []
    for num_bytes in SIZES:
        x = part_of(rank, num_bytes).to(device)
        eager = one_shot(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = one_shot(x)
        for _ in range(3):
            graph.replay()
        sums += [eager.float().cpu().numpy(), captured.float().cpu().numpy()]
    sender.send(sums)


@pytest.mark.gpu
def test_one_shot_gives_every_rank_the_same_sum(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=sums_on_gpu, args=(rank, tmp_path, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()  # so that a rank that fails is heard
    first, second = (receiver.recv() for receiver, _ in pipes)
    for process in processes:
        process.join()
    expected = [part_of(0, num_bytes) + part_of(1, num_bytes) for num_bytes in SIZES for _ in range(2)]
    for one, other, total in zip(first, second, expected, strict=True):
        assert (one == other).all()
        assert (one == total.float().numpy()).all()
