"""One all-reduce of bfloat16 between CPU ranks of this machine, by the size of the message: a part of parallel.py.

A process a rank, over gloo and over shared memory (medians). Backends and shapes take turns three times, and the least
of three counts.
"""

import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvasir_runtime.parallel.groups import CollectiveBackend, RankGroups, meet, open_meeting
from kvasir_runtime.parallel.meeting_point import LOOPBACK, MeetingPoint
from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes
from kvasir_runtime.parallel.topology import RankPlace, Topology

CPU_BACKENDS: tuple[CollectiveBackend, ...] = ("gloo", "shared_memory")

Shape = tuple[int, int]
"""Tokens of a step, hidden size."""
Seconds = dict[tuple[str, Shape], float]


def all_reduces(num_ranks: int, shapes: Sequence[Shape]) -> str:
    """A table, a row for each shape. Raises RuntimeError when a rank fails."""
    context, segment = multiprocessing.get_context("spawn"), SharedSegment.create(segment_bytes(num_ranks))
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=time_all_reduces, args=(place, Path(folder), segment, shapes, sender), daemon=True)
            for place in Topology(tensor_size=num_ranks).places()
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            seconds: Seconds = receiver.recv()
        except EOFError as error:
            raise RuntimeError("a rank failed, and has said why") from error
        finally:
            for process in processes:
                process.kill()  # it has nothing more to say, and may wait for one that failed
                process.join()
    return table(num_ranks, shapes, seconds)


def time_all_reduces(
    place: RankPlace, folder: Path, segment: SharedSegment, shapes: Sequence[Shape], sender: Connection
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.tensor_size))

    def groups_over(backend: CollectiveBackend) -> RankGroups:
        store = open_meeting(MeetingPoint(folder / backend), place.tensor_size)
        return meet(place, store, LOOPBACK, torch.device("cpu"), backend, segment)

    groups = {backend: groups_over(backend) for backend in CPU_BACKENDS}  # all are kept: others may still connect
    seconds: Seconds = {}
    for _, shape, backend in itertools.product(range(3), shapes, CPU_BACKENDS):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        median = median_seconds(groups[backend].tensor.all_reduce, x)
        seconds[backend, shape] = min(median, seconds.get((backend, shape), math.inf))
    if place.is_reporter:
        sender.send(seconds)


def median_seconds(all_reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    times = []
    for _ in range(10 if x.numel() > 1_000_000 else 100):
        start = time.perf_counter()
        all_reduce(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(num_ranks: int, shapes: Sequence[Shape], seconds: Seconds) -> str:
    lines = [
        f"## One all-reduce of bfloat16 between {num_ranks} processes, us (least of three)",
        "",
        f"| tokens x hidden | {' | '.join(CPU_BACKENDS)} |",
        "|---" * (len(CPU_BACKENDS) + 1) + "|",
    ]
    for shape in shapes:
        cells = (f"{seconds[backend, shape] * 1e6:.1f}" for backend in CPU_BACKENDS)
        lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)
