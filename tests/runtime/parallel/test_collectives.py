"""Every backend gives all ranks the same sum, pieces and source, and counts what it was handed."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.exactness.rank_threads import meet_all
from torch import Tensor

from kvasir_runtime.parallel.collectives import Collectives, SingleRank
from kvasir_runtime.parallel.shared_segment import BUFFER_BYTES
from kvasir_runtime.parallel.topology import Topology

Together = Callable[[Callable[[Collectives], Any]], list[Any]]
GROUPS = [("gloo", 2), ("gloo", 3), ("shared_memory", 2), ("shared_memory", 3)]


@pytest.fixture(params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def together(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Together]:
    """Runs a function on every rank's end at once; their results in the order of ranks."""
    backend, size = request.param
    ends = [groups.tensor for groups in meet_all(Topology(tensor_size=size), tmp_path, backend)]
    assert {end.name for end in ends} == {backend}
    with ThreadPoolExecutor(size) as pool:
        yield lambda function: list(pool.map(function, ends))


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def test_a_sum_is_the_same_number_on_every_rank(together: Together) -> None:
    for shape in ((3, 5), (1, 1), (40, 1000)):  # 40,000 numbers: in parts of several ranks, and of several threads
        sums = together(lambda end: (end.size, end.all_reduce(part_of(end.rank, shape))))  # noqa: B023
        expected = sum(part_of(rank, shape) for rank in range(sums[0][0]))
        torch.testing.assert_close(sums[0][1], expected)
        assert all(torch.equal(total, sums[0][1]) for _, total in sums)


def test_a_sum_longer_than_a_buffer_goes_in_pieces(together: Together) -> None:
    count = BUFFER_BYTES // 4 * 2 + 7
    sums = together(lambda end: (end.size, end.all_reduce(part_of(end.rank, (count,)))))
    torch.testing.assert_close(sums[1][1], sum(part_of(rank, (count,)) for rank in range(sums[0][0])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_numbers_are_summed(together: Together, dtype: torch.dtype) -> None:
    sums = together(lambda end: (end.size, end.all_reduce(part_of(end.rank, (7, 33), dtype))))
    expected = sum(part_of(rank, (7, 33), dtype).float() for rank in range(sums[0][0]))
    torch.testing.assert_close(sums[0][1].float(), expected, rtol=2e-2, atol=2e-2)
    assert all(torch.equal(total, sums[0][1]) for _, total in sums)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_pieces_are_joined_in_the_order_of_ranks(together: Together, dim: int) -> None:
    joined = together(lambda end: (end.size, end.all_gather(part_of(end.rank, (3, 4)), dim)))
    expected = torch.cat([part_of(rank, (3, 4)) for rank in range(joined[0][0])], dim)
    assert all(torch.equal(whole, expected) for _, whole in joined)


def test_a_piece_wider_than_a_buffer_is_joined(together: Together) -> None:
    shape = (2, BUFFER_BYTES // 4 + 3)
    joined = together(lambda end: (end.size, end.all_gather(part_of(end.rank, shape), -1)))
    assert torch.equal(joined[0][1], torch.cat([part_of(rank, shape) for rank in range(joined[0][0])], -1))


def test_everybody_gets_what_the_source_has(together: Together) -> None:
    drafts = torch.arange(12, dtype=torch.int32).view(4, 3)
    seen = together(lambda end: end.broadcast(drafts.clone() if end.rank == 1 else torch.zeros_like(drafts), source=1))
    assert all(torch.equal(copy, drafts) for copy in seen)


def test_many_calls_in_a_row_do_not_overtake_each_other(together: Together) -> None:
    def run(end: Collectives) -> list[float]:
        return [end.all_reduce(torch.full((3,), float(number * (end.rank + 1)))).sum().item() for number in range(300)]

    totals = together(run)
    weight = sum(range(1, len(totals) + 1))
    assert all(seen == [3.0 * number * weight for number in range(300)] for seen in totals)


def test_calls_and_bytes_are_counted(together: Together) -> None:
    def run(end: Collectives) -> Any:
        end.all_reduce(torch.zeros(4))
        end.all_reduce(torch.zeros(2))
        end.all_gather(torch.zeros(3), 0)
        return end.counts

    (counts, *_) = together(run)
    assert (counts.calls[:2], counts.num_bytes[:2]) == ([2, 1], [24, 12])


def test_a_collective_counts_from_when_a_rank_waits_in_it(together: Together) -> None:
    ends: dict[int, Collectives] = {}

    def run(end: Collectives) -> None:
        ends[end.rank] = end
        deadline = time.monotonic() + 20
        while end.rank == 1 and not (0 in ends and ends[0].counts.calls[0]):
            assert time.monotonic() < deadline, "the watch over the ranks would not see who is awaited"
            time.sleep(0.001)
        end.all_reduce(torch.zeros(1))

    together(run)


def test_one_rank_has_nothing_to_do() -> None:
    x = torch.ones(2)
    alone = SingleRank()
    assert alone.all_reduce(x) is alone.all_gather(x, 0) is alone.broadcast(x, 0) is x
