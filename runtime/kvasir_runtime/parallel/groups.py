"""One rank's groups, made once when all ranks have met at a store."""

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    FileStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
)

from kvasir_runtime.errors import CollectiveFailedError, ConfigurationError, RankFailedError
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.parallel.collectives import Collectives, SingleRank
from kvasir_runtime.parallel.meeting_point import MEETING_TIMEOUT, MeetingPoint
from kvasir_runtime.parallel.process_group import ProcessGroupCollectives
from kvasir_runtime.parallel.shared_memory import SharedMemoryCollectives
from kvasir_runtime.parallel.shared_segment import SharedSegment
from kvasir_runtime.parallel.stage_link import StageLink
from kvasir_runtime.parallel.topology import RankPlace, Topology

CollectiveBackend = Literal["auto", "gloo", "nccl", "shared_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    place: RankPlace
    tensor: Collectives
    least: Callable[[int], int]
    """The least of all ranks' numbers; every rank calls it at the same point."""
    least_of_stage: Callable[[int], int]
    """Of those that share this one's layers."""
    link: StageLink | None = None
    """To the other pipeline stages; None where this is the only one."""


def alone(topology: Topology | None = None) -> RankGroups:
    """Of the one rank of an engine."""
    return RankGroups(
        place=RankPlace(topology or Topology(), 0),
        tensor=SingleRank(),
        least=lambda value: value,
        least_of_stage=lambda value: value,
    )


def host_meeting(address: str, port: int) -> Store:
    """At an IP address of node 0, for the ranks of all nodes and engines, as the first engine sees it. It lasts as long
    as the store is kept; another group of this machine may have one at the same port of another address. Raises
    ConfigurationError, and OSError where the address is not this node's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigurationError(f"--master-port {port} of {address} is in use; choose a free one") from error
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return _own_keys(store, data_rank=0)


def open_meeting(meeting_point: MeetingPoint, num_ranks: int) -> Store:
    """Waits for node 0. Raises RankFailedError."""
    if meeting_point.file is not None:
        return FileStore(str(meeting_point.file), num_ranks)
    host, port = meeting_point.host, meeting_point.port
    try:
        store = TCPStore(host, port, is_master=False, timeout=MEETING_TIMEOUT)
    except RuntimeError as error:  # torch has no narrower one
        raise RankFailedError(
            f"node 0 cannot be reached at {host}:{port}: {error}; check --master-addr and --master-port"
        ) from error
    return _own_keys(store, meeting_point.data_rank)


def _own_keys(store: Store, data_rank: int) -> Store:
    """Of one engine among several that meet at one store."""
    return PrefixStore(f"engine-{data_rank}", store)


def meet(
    place: RankPlace,
    store: Store,
    host: str,
    device: torch.device,
    backend: CollectiveBackend,
    segment: SharedSegment | None = None,
) -> RankGroups:
    """Waits until all ranks are there. `host`: this node's address, as the others reach it; `segment`: the tensor
    group's, where its ranks share a node. Raises ConfigurationError, and CollectiveFailedError where one does not
    come."""
    world = _gloo(PrefixStore("world", store), place.rank, place.topology.num_ranks, host)
    sharers = world
    if place.pipeline_size > 1:
        sharers = _gloo(PrefixStore(f"stage-{place.pipeline_rank}", store), place.tensor_rank, place.tensor_size, host)
    return RankGroups(
        place=place,
        tensor=_tensor_collectives(place, store, host, device, backend, segment),
        least=lambda value: _least(world, value),
        least_of_stage=lambda value: _least(sharers, value),
        link=_stage_link(place, PrefixStore(f"pipeline-{place.tensor_rank}", store), host, device, backend),
    )


def _tensor_collectives(
    place: RankPlace,
    store: Store,
    host: str,
    device: torch.device,
    backend: CollectiveBackend,
    segment: SharedSegment | None,
) -> Collectives:
    rank, size = place.tensor_rank, place.tensor_size
    own_store = PrefixStore(f"tensor-{place.pipeline_rank}", store)
    if size == 1:
        return SingleRank()
    if backend == "nccl" or (backend == "auto" and device.type == "cuda"):
        return ProcessGroupCollectives("nccl", _nccl(own_store, rank, size, device))
    library = None if segment is None or device.type != "cpu" else load_library()
    if backend == "shared_memory" and library is None:
        raise ConfigurationError(
            "--collective-backend shared_memory needs a tensor group of CPU ranks on one node and compiled kernels; "
            "use auto"
        )
    if backend == "gloo" or library is None or segment is None:
        return ProcessGroupCollectives("gloo", _gloo(own_store, rank, size, host))
    return SharedMemoryCollectives(library, segment, rank, size)


def _stage_link(
    place: RankPlace, store: Store, host: str, device: torch.device, backend: CollectiveBackend
) -> StageLink | None:
    """Among the ranks at this one's place in the tensor groups of all stages."""
    if place.pipeline_size == 1:
        return None
    if backend == "nccl" or device.type == "cuda":  # gloo sends from host memory only
        return StageLink(_nccl(store, place.pipeline_rank, place.pipeline_size, device), device)
    return StageLink(_gloo(store, place.pipeline_rank, place.pipeline_size, host), torch.device("cpu"))


def _gloo(store: Store, rank: int, size: int, host: str) -> ProcessGroup:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = MEETING_TIMEOUT
    options._threads = 1
    try:
        return cast(ProcessGroup, ProcessGroupGloo(store, rank, size, options))  # torch's stubs know a part of it
    except RuntimeError as error:  # torch has no narrower one
        raise CollectiveFailedError(
            f"rank {rank} could not meet the others of its group of {size}, waiting {MEETING_TIMEOUT} at most: "
            f"{error}; their logs, also on other nodes, say why they are not there"
        ) from error


def _nccl(store: Store, rank: int, size: int, device: torch.device) -> ProcessGroup:
    if device.type != "cuda":
        raise ConfigurationError("--collective-backend nccl needs GPUs; use gloo or shared_memory on CPUs")
    from torch.distributed import ProcessGroupNCCL  # not in builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = MEETING_TIMEOUT
    return cast(ProcessGroup, ProcessGroupNCCL(store, rank, size, options))


def _least(world: ProcessGroup, value: int) -> int:
    number = torch.tensor([value])
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.MIN
    try:
        world.allreduce([number], options).wait()
    except RuntimeError as error:  # torch has no narrower one
        raise CollectiveFailedError(
            f"the least of all ranks' numbers cannot be had, mostly since another rank has ended: {error}"
        ) from error
    return int(number)
