"""A rank as a child process, seen from its parent: the engine core on node 0, the node's own process elsewhere.

It is spawned and follows its parent's life; what it has to say it says over its links.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from kvasir_runtime.child_process import follow_parent, interrupts_blocked
from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.malloc import share_one_arena
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.parallel.shared_segment import SharedSegment, segment_bytes
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.links import LinkAddresses


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What the child is told; picklable."""

    config: RuntimeConfig
    place: RankPlace
    addresses: LinkAddresses | None
    """Of the links to the core; None, on other nodes than its own: the store tells them."""
    meeting_point: MeetingPoint
    segment: SharedSegment | None
    """Of its tensor group, where that shares this node."""
    status_file: Path
    """Where the ranks of this node show that they live (RankStatus)."""
    parent_pid: int


@contextmanager
def running_ranks(
    config: RuntimeConfig,
    places: Sequence[RankPlace],
    addresses: LinkAddresses | None,
    meeting_point: MeetingPoint,
    status_file: Path,
) -> Iterator[dict[int, BaseProcess]]:
    """These ranks live while the block runs; behind it none is left."""
    context = multiprocessing.get_context("spawn")
    processes: dict[int, BaseProcess] = {}
    segments = {
        place.tensor_group: SharedSegment.create(segment_bytes(place.tensor_size))
        for place in places
        if place.tensor_rank == 0 and place.tensor_group_shares_a_node
    }
    try:
        for place in places:
            segment = segments.get(place.tensor_group)
            arguments = RankArguments(config, place, addresses, meeting_point, segment, status_file, os.getpid())
            process = context.Process(target=_run_rank, args=(arguments,), name=f"kvasir-rank-{place.rank}")
            with interrupts_blocked():
                process.start()
            processes[place.rank] = process
        yield processes
    finally:
        for rank in processes.values():
            rank.kill()
        for rank in processes.values():
            rank.join()
        for shared in segments.values():
            shared.close()


def _run_rank(arguments: RankArguments) -> None:
    follow_parent(arguments.parent_pid)
    share_one_arena()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the terminal's signals, Kubernetes' are the first process'
    from kvasir_runtime.ranks.rank_main import run_rank  # torch: not for every parent

    run_rank(arguments)
