"""Starts what executes steps: a thread of the engine core's for one rank, processes of their own for several."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_runtime.config import ParallelConfig, RuntimeConfig
from kvasir_runtime.engine.core import StepExecutor
from kvasir_runtime.engine.tokenizer import load_vocabulary
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.execution.description import RankDescription
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.ranks.liveness import RankLiveness
from kvasir_runtime.ranks.rank_process import running_ranks
from kvasir_runtime.ranks.rendezvous import Rendezvous
from kvasir_runtime.ranks.watch import RankWatch
from kvasir_runtime.service_secret import curve_keys

if TYPE_CHECKING:
    import zmq
    from torch import Tensor  # not for a core whose ranks are elsewhere


def topology_of(parallel: ParallelConfig, data_rank: int) -> Topology:
    return Topology(
        tensor_size=parallel.tensor_parallel_size,
        pipeline_size=parallel.pipeline_parallel_size,
        layer_partition=parallel.pipeline_layer_partition,
        num_nodes=parallel.nnodes,
        expert_parallel=parallel.enable_expert_parallel,
        data_size=parallel.data_parallel_size,
        data_rank=data_rank,
    )


def meeting_point_of(parallel: ParallelConfig, data_rank: int) -> MeetingPoint:
    """Of an engine's ranks on several nodes."""
    return MeetingPoint(host=parallel.master_addr, port=parallel.master_port, data_rank=data_rank)


@dataclass(frozen=True, slots=True)
class StartedRanks:
    executor: StepExecutor
    description: RankDescription
    """The reporter's."""
    stages: Sequence[RankDescription]
    """Of one rank of each pipeline stage."""
    kv_buffer: "Tensor | None" = None
    """uint8 [num_blocks, page_bytes] of the one rank in this process; None where ranks are processes of their own."""
    transfer_links: Sequence["zmq.Socket[bytes]"] = ()
    """To the transfer threads of ranks that are."""


@contextmanager
def running_ranks_of(
    config: RuntimeConfig, ipc_dir: Path, data_rank: int, on_failure: Callable[[RankFailedError], None]
) -> Iterator[StartedRanks]:
    """The ranks, loaded, and what executes their steps; behind the block nothing of them is left.

    A rank that fails later is told by `on_failure`, on a thread of its own. Raises KvasirRuntimeError.
    """
    topology = topology_of(config.parallel, data_rank)
    if topology.runs_in_core:
        with one_rank(config, topology) as started:
            yield started
    else:
        with several_ranks(config, topology, ipc_dir, on_failure) as started:
            yield started


@contextmanager
def one_rank(config: RuntimeConfig, topology: Topology) -> Iterator[StartedRanks]:
    """In this process."""
    from kvasir_runtime.execution.executor import Executor  # torch: not for a core whose ranks are elsewhere
    from kvasir_runtime.execution.worker import load_worker
    from kvasir_runtime.malloc import keep_freed_memory
    from kvasir_runtime.parallel.groups import alone
    from kvasir_runtime.speculative.select import proposer_of

    execution, groups = config.execution, alone(topology)
    worker = load_worker(
        config.model,
        config.cache,
        execution,
        config.scheduler,
        proposer_of(execution),
        groups,
        make_vocabulary=partial(load_vocabulary, config.model),
    )
    if worker.description.is_on_cpu:
        keep_freed_memory()
    executor = Executor(worker.runner, worker.prepare_thread, worker.prepare_grammar)
    try:
        yield StartedRanks(executor, worker.description, [worker.description], worker.runner.kv_buffer)
    finally:
        executor.close()


@contextmanager
def several_ranks(
    config: RuntimeConfig, topology: Topology, ipc_dir: Path, on_failure: Callable[[RankFailedError], None]
) -> Iterator[StartedRanks]:
    """A process each; those of other nodes, perhaps all, are started there, and who does not come is named."""
    folder = ipc_dir / f"ranks-{topology.data_rank}"
    folder.mkdir()
    with (
        _removed_behind(folder),
        _links(config.parallel, topology, folder) as (links, meeting_point),
        running_ranks(config, topology.places(node=0), links.bound, meeting_point, folder / "status") as processes,
    ):
        executor, totals = RankExecutor(links), CollectiveTotals(ipc_dir, topology.data_size)
        watch = RankWatch(
            links,
            executor,
            processes,
            Rendezvous(topology, f"{config.parallel.master_addr}:{config.parallel.master_port}"),
            RankLiveness(topology.num_ranks, config.server.stall_seconds, topology.tensor_size),
            partial(totals.write, topology.data_rank),
            on_failure,
        )
        try:
            descriptions = watch.descriptions.result()
            description = _joined(descriptions, topology.reporter)
            stages = descriptions[:: topology.tensor_size]
            yield StartedRanks(executor, description, stages, transfer_links=links.transfers)
        finally:
            watch.close()


@contextmanager
def _removed_behind(folder: Path) -> Iterator[None]:
    """Whoever starts next finds nothing in it."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _links(parallel: ParallelConfig, topology: Topology, folder: Path) -> Iterator[tuple[CoreLinks, MeetingPoint]]:
    """The core's ends, and where ranks find each other."""
    if topology.num_nodes == 1:
        links = CoreLinks(ipc_addresses(folder, topology.num_ranks))
        try:
            yield links, MeetingPoint(folder / "meeting")
        finally:
            links.close()
        return
    from kvasir_runtime.ranks.meeting import told_links  # torch: not for a core of one node

    point = meeting_point_of(parallel, topology.data_rank)
    with told_links(point, topology.num_ranks, curve_keys(os.environ)) as links:
        yield links, point


def _joined(descriptions: Sequence[RankDescription], reporter: int) -> RankDescription:
    """The reporter's; each phase of starting took as long as on the slowest rank."""
    phases = [phase for description in descriptions for phase in description.startup_seconds]
    slowest = {phase: max(of.startup_seconds.get(phase, 0.0) for of in descriptions) for phase in phases}
    return replace(descriptions[reporter], startup_seconds=slowest)
