"""What a rank computes with on its kind of device: kernels, attention, copies, memory, graphs.

`load_worker` is given another where a step is to be computed in another way: by plain twins, or watched.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, DecodeBounds
from kvasir_runtime.attention.select import select_backend
from kvasir_runtime.execution.captures import CudaGraphCapture, RecordingCapture, ToCapture
from kvasir_runtime.execution.executor import StepRunner
from kvasir_runtime.execution.graphs import (
    MOST_RECORDED_REQUESTS,
    Capture,
    GraphMemory,
    RunnerGraphs,
    graph_sizes,
)
from kvasir_runtime.execution.kv_buffer import DeviceMemory, SequenceLimits
from kvasir_runtime.execution.memory_profile import measure_memory
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import LoadInputs, load_inputs_reference
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.ops import Ops, cpu_ops
from kvasir_runtime.kernels.step_ops import StepOps, cpu_step_ops
from kvasir_runtime.models.decoder import ComputeStep
from kvasir_runtime.parallel.counts import CollectiveCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSetup:
    """What the graphs of a runner are made for."""

    block_tables: Tensor
    extras: Mapping[str, Tensor]
    """Of all steps."""
    max_seq_len: int
    max_num_seqs: int
    num_bytes: int
    """That they may take."""
    counts: CollectiveCounts
    """Of the collectives in a step."""
    agreed: Callable[[Capture], Capture]
    """The same capture where ranks must all succeed in it."""
    kernels: frozenset[str]
    """Names of what a step launches, attention and others."""

    def to_capture(self, compute: ComputeStep, load_inputs: LoadInputs = load_inputs_reference) -> ToCapture:
        return ToCapture(compute, self.block_tables, self.max_seq_len, self.counts, load_inputs, self.extras)


class Platform:
    """Of one rank's device; CPUs', of which that of CUDA differs."""

    never_waits = False
    """Whether the host, while it drafts, must not read what the device holds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ops(self) -> Ops:
        return cpu_ops()

    def step_ops(self) -> StepOps:
        return cpu_step_ops()

    def attention_backend(self, name: str, bounds: DecodeBounds, kv_cache_dtype: str) -> AttentionBackend:
        """Raises ConfigurationError."""
        return select_backend(name, self.device, bounds, kv_cache_dtype)

    def transfers(self) -> Transfers:
        return Transfers(self.device)

    def memory(
        self,
        make_runner: Callable[[int], StepRunner],
        limits: SequenceLimits,
        max_drafts: int,
        num_sharers: int,
        is_pooling: bool,
    ) -> DeviceMemory:
        """As `measure_memory` finds it."""
        return measure_memory(self.device, make_runner, limits, max_drafts, num_sharers, is_pooling)

    def graphs(self, setup: GraphSetup) -> RunnerGraphs:
        """Recordings. A recorder does not see other kernels than the compiled ones."""
        library = load_library() if setup.kernels == {"cpu"} else None
        sizes = range(1, min(setup.max_num_seqs, MOST_RECORDED_REQUESTS) + 1)

        def capture_of(compute: ComputeStep) -> Capture:
            assert library is not None, "there is memory for recordings only where there are kernels to record"
            return setup.agreed(RecordingCapture(library, setup.to_capture(compute)))

        return RunnerGraphs(capture_of, sizes, GraphMemory(setup.num_bytes if library else 0), is_exact=True)


class CudaPlatform(Platform):
    never_waits = True

    def ops(self) -> Ops:
        from kvasir_runtime.kernels.ops_triton import triton_ops  # takes a second to import, for nothing on CPUs

        return triton_ops()

    def step_ops(self) -> StepOps:
        from kvasir_runtime.kernels.ops_triton import triton_step_ops

        return triton_step_ops()

    def graphs(self, setup: GraphSetup) -> RunnerGraphs:
        def capture_of(compute: ComputeStep) -> Capture:
            what = setup.to_capture(compute, self.step_ops().load_inputs)
            return setup.agreed(CudaGraphCapture(what))

        return RunnerGraphs(capture_of, graph_sizes(setup.max_num_seqs), GraphMemory(setup.num_bytes))


def platform_of(device: torch.device) -> Platform:
    return CudaPlatform(device) if device.type == "cuda" else Platform(device)
