"""Captures one shape of decode step as a CUDA graph: the thin part of `graphs` that needs a device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS
from kvasir_runtime.execution.captured_graph import CapturedGraph
from kvasir_runtime.execution.graphs import CapturedStep, CaptureError, GraphShape
from kvasir_runtime.execution.static_inputs import StaticInputs
from kvasir_runtime.kernels.inputs import LoadInputs, load_inputs_reference
from kvasir_runtime.models.decoder import ComputeStep
from kvasir_runtime.parallel.counts import CollectiveCounts


class CudaGraphCapture:
    """Captures `compute` in one memory pool: its graphs run one at a time, and so may use the same memory. What one of
    them leaves is read while graphs of another `compute` run, which have a pool of their own."""

    def __init__(
        self,
        compute: ComputeStep,
        block_tables: Tensor,
        max_seq_len: int,
        counts: CollectiveCounts | None = None,
        load_inputs: LoadInputs = load_inputs_reference,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """`counts` are of the collectives in `compute`, if there are any; `load_inputs` comes before each replay;
        `extras` are those of all its inputs."""
        self._compute = compute
        self._block_tables = block_tables
        self._max_seq_len = max_seq_len
        self._counts = CollectiveCounts() if counts is None else counts
        self._load_inputs = load_inputs
        self._extras = extras
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def __call__(self, shape: GraphShape) -> CapturedStep:
        """Waits for the device. Raises CaptureError."""
        torch.cuda.empty_cache()  # as capturing does: what it gives back would hide what the graph takes
        free_before = torch.cuda.mem_get_info()[0]
        static = StaticInputs(
            shape.num_requests,
            shape.num_tokens,
            self._block_tables,
            self._max_seq_len,
            shape.max_query_len,
            self._load_inputs,
            self._extras,
        )
        graph = torch.cuda.CUDAGraph()
        try:
            # Compiles kernels and loads libraries, which a capture must not, nor the first replay.
            static.load(static.inputs)
            self._compute(static.inputs, None)
            before = self._counts.copy()
            # Other threads may use the device meanwhile: they copy results and serve transfers.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self._compute(static.inputs, None)
        except RuntimeError as error:  # torch has no narrower one; running out of memory is one
            raise CaptureError(str(error)) from error
        memory_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        return CapturedGraph(graph, static, output, memory_bytes, self._counts, self._counts.since(before))
