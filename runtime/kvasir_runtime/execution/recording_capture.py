"""Captures one shape of decode step on a CPU, as a recording of its kernels' calls."""

from collections.abc import Mapping
from ctypes import CDLL

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS
from kvasir_runtime.execution.captured_graph import CapturedGraph
from kvasir_runtime.execution.graphs import CapturedStep, CaptureError, GraphShape
from kvasir_runtime.execution.static_inputs import StaticInputs
from kvasir_runtime.kernels.recording import Arena, Recorder, RecordingError
from kvasir_runtime.models.decoder import ComputeStep
from kvasir_runtime.parallel.counts import CollectiveCounts


class RecordingCapture:
    """Records `compute`. Its recordings share memory: what one leaves is read before the next runs."""

    def __init__(
        self,
        library: CDLL,
        compute: ComputeStep,
        block_tables: Tensor,
        max_seq_len: int,
        counts: CollectiveCounts | None = None,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """`counts` are of the collectives in `compute`, if there are any; `extras` are those of all its inputs."""
        self._library = library
        self._compute = compute
        self._block_tables = block_tables
        self._max_seq_len = max_seq_len
        self._counts = CollectiveCounts() if counts is None else counts
        self._extras = extras
        self._arena = Arena()

    @torch.inference_mode()
    def __call__(self, shape: GraphShape) -> CapturedStep:
        """Raises CaptureError."""
        static = StaticInputs(
            shape.num_requests,
            shape.num_tokens,
            self._block_tables,
            self._max_seq_len,
            shape.max_query_len,
            extras=self._extras,
        )
        num_bytes, before = self._arena.num_bytes, self._counts.copy()
        self._arena.begin()
        with Recorder(self._library, self._arena) as recorder:
            output = self._compute(static.inputs, None)
        try:
            recording = recorder.recording()
        except RecordingError as error:
            raise CaptureError(str(error)) from error
        memory_bytes = self._arena.num_bytes - num_bytes
        return CapturedGraph(recording, static, output, memory_bytes, self._counts, self._counts.since(before))
