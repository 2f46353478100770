"""One all-reduce of bfloat16 between ranks of this machine, by the size of the message, over what the engine has.

    python benchmarks/all_reduce.py --device cuda --ranks 8

On GPUs NCCL beside one shot (parallel/one_shot.py), in a CUDA graph of many calls as decode steps have them (means),
and call by call (medians); on CPUs gloo beside shared memory (medians), which is also a part of parallel.py. A process
a rank. Backends and shapes take turns three times, and the least of three counts.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvasir_runtime.parallel.groups import CollectiveBackend, meet, open_meeting
from kvasir_runtime.parallel.meeting_point import LOOPBACK, MeetingPoint
from kvasir_runtime.parallel.one_shot import MOST_BYTES, OneShotSum, replayed_seconds
from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes
from kvasir_runtime.parallel.topology import RankPlace, Topology

BATCH_SIZES = (1, 4, 16, 64, 256)
HIDDEN_SIZES = (1024, 2048, 4096, 8192)
CPU_BACKENDS: tuple[CollectiveBackend, ...] = ("gloo", "shared_memory")

Shape = tuple[int, int]
"""Tokens of a step, hidden size."""
Clock = Callable[[torch.Tensor], float]
"""Seconds of one all-reduce of it; all ranks at once."""
Seconds = dict[tuple[str, Shape], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=HIDDEN_SIZES)
    options = parser.parse_args()
    shapes = list(itertools.product(options.batch_sizes, options.hidden_sizes))
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{len(os.sched_getaffinity(0))} cores"
    print(f"torch {torch.__version__}, {name}, load average at the start {os.getloadavg()[0]:.1f}\n")
    print(all_reduces(options.device, options.ranks, shapes), flush=True)


def all_reduces(device: str, num_ranks: int, shapes: Sequence[Shape]) -> str:
    """A table, a row for each shape. Raises RuntimeError when a rank fails."""
    context, segment = multiprocessing.get_context("spawn"), SharedSegment.create(segment_bytes(num_ranks))
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=time_all_reduces, args=(place, device, Path(folder), segment, shapes, sender), daemon=True
            )
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
    place: RankPlace, device: str, folder: Path, segment: SharedSegment, shapes: Sequence[Shape], sender: Connection
) -> None:
    clocks = cuda_clocks(place, folder) if device == "cuda" else cpu_clocks(place, folder, segment)
    seconds: Seconds = {}
    for _, shape, (name, clock) in itertools.product(range(3), shapes, clocks.items()):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        if name.startswith("one shot") and x.nbytes > MOST_BYTES:
            continue
        seconds[name, shape] = min(clock(x), seconds.get((name, shape), math.inf))
    if place.is_reporter:
        sender.send(seconds)


def cpu_clocks(place: RankPlace, folder: Path, segment: SharedSegment) -> Mapping[str, Clock]:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.tensor_size))

    def clock(backend: CollectiveBackend) -> Clock:
        store = open_meeting(MeetingPoint(folder / backend), place.tensor_size)
        groups = meet(place, store, LOOPBACK, torch.device("cpu"), backend, segment)  # kept: others may still connect
        return lambda x: seconds_of(groups.tensor.all_reduce, lambda: None, x)

    return {backend: clock(backend) for backend in CPU_BACKENDS}


def cuda_clocks(place: RankPlace, folder: Path) -> Mapping[str, Clock]:
    device, size = torch.device("cuda", place.tensor_rank), place.tensor_size
    torch.cuda.set_device(device)
    groups = meet(place, open_meeting(MeetingPoint(folder / "nccl"), size), LOOPBACK, device, "nccl")
    store = open_meeting(MeetingPoint(folder / "one-shot"), size)
    one_shot = OneShotSum("one-shot", store, place.tensor_rank, size, device)
    return {
        "NCCL, in a graph": lambda x: replayed_seconds(lambda: groups.tensor.all_reduce(x)),
        "one shot, in a graph": lambda x: replayed_seconds(lambda: one_shot(x)),
        "NCCL": lambda x: seconds_of(groups.tensor.all_reduce, torch.cuda.synchronize, x),
        "one shot": lambda x: seconds_of(one_shot, torch.cuda.synchronize, x),
    }


def seconds_of(all_reduce: Callable[[torch.Tensor], torch.Tensor], wait: Callable[[], None], x: torch.Tensor) -> float:
    times = []
    for _ in range(10 if x.numel() > 1_000_000 else 100):
        start = time.perf_counter()
        all_reduce(x)
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def table(num_ranks: int, shapes: Sequence[Shape], seconds: Seconds) -> str:
    names = list(dict.fromkeys(name for name, _ in seconds))
    lines = [
        f"## One all-reduce of bfloat16 between {num_ranks} processes, us (least of three)",
        "",
        f"| tokens x hidden | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for shape in shapes:
        figures = (seconds.get((name, shape)) for name in names)
        cells = ("-" if figure is None else f"{figure * 1e6:.1f}" for figure in figures)
        lines.append(f"| {shape[0]} x {shape[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
