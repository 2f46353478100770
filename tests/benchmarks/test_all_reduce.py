"""The benchmark of all-reduces has a table of all backends."""

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from benchmarks.all_reduce import all_reduces, table, time_all_reduces

from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes
from kvasir_runtime.parallel.topology import Topology

SHAPES = [(1, 64), (4, 64)]


def check(lines: list[str]) -> None:
    assert lines[0].startswith("## One all-reduce of bfloat16 between 2 processes, us")
    assert lines[2] == "| tokens x hidden | gloo | shared_memory |"
    cells = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[0] for row in cells] == ["1 x 64", "4 x 64"]
    assert all(float(figure) > 0 for row in cells for figure in row[1:])


def test_a_line_for_each_shape_and_a_column_for_each_backend(tmp_path: Path) -> None:
    """Ranks that are threads."""
    segment, (receiver, sender), num_threads = SharedSegment.create(segment_bytes(2)), Pipe(), torch.get_num_threads()
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(time_all_reduces, place, tmp_path, segment, SHAPES, sender)
            for place in Topology(tensor_size=2).places()
        ]
        for rank in ranks:
            rank.result()
    torch.set_num_threads(num_threads)
    check(table(2, SHAPES, receiver.recv()).splitlines())


@pytest.mark.slow
def test_ranks_are_processes() -> None:
    check(all_reduces(2, SHAPES).splitlines())
