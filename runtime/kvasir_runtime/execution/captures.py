"""Captures one shape of decode step, to be replayed over inputs that stay where they are: a recording of its kernels'
calls on a CPU, a CUDA graph there; where ranks compute together, on all of them or on none."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, GroupInputs, StepInputs
from kvasir_runtime.execution.graphs import Capture, CapturedStep, CaptureError, GraphShape
from kvasir_runtime.kernels.inputs import DecodeTensors, LoadInputs, StepLengths, load_inputs_reference
from kvasir_runtime.kernels.recording import Arena, Recorder, RecordingError
from kvasir_runtime.models.decoder import ComputeStep, DecoderOutput
from kvasir_runtime.parallel.counts import CollectiveCounts


class StaticInputs:
    """Inputs of one graph: tensors that stay where they are, into whose front each step is copied.

    Behind the step's requests stand padding requests: no sequence, so they read no key. Behind its tokens stand padding
    tokens: slots -1, so they write none. Where requests may differ in length a padding token belongs to no request, and
    what is computed of it is undefined: NaN, maybe.
    """

    def __init__(
        self,
        num_requests: int,
        num_tokens: int,
        block_tables: Tensor,
        max_seq_len: int,
        max_query_len: int | None = None,
        load_inputs: LoadInputs = load_inputs_reference,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """For decodes over block_tables int32 [num_groups, max_num_seqs, max_blocks], all padding to begin with.

        `num_tokens` and `max_query_len` as in `GraphShape`; `extras` are those of all steps.
        """
        device = block_tables.device
        longest = num_tokens // num_requests if max_query_len is None else max_query_len
        # As unequal as they may be, since launches are sized by the longest.
        ends = np.minimum(np.arange(num_requests + 1, dtype=np.int32) * longest, num_tokens)
        starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * longest
        self.inputs = StepInputs(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            query_starts=starts.clamp_(max=num_tokens),
            seq_lens=torch.zeros(num_requests, dtype=torch.int32, device=device),
            rows=torch.zeros(num_requests, dtype=torch.int32, device=device),
            groups=tuple(
                GroupInputs(table, torch.full((num_tokens,), -1, dtype=torch.int64, device=device))
                for table in block_tables
            ),
            lengths=StepLengths(np.diff(ends), num_requests, max_seq_len),
            extras=extras,
        )
        self._load = load_inputs
        self._tensors = _tensors(self.inputs)

    def load(self, step: StepInputs) -> None:
        """Copy a step of no more requests and tokens. What is left of a larger one becomes padding."""
        self._load(_tensors(step), self._tensors)


def _tensors(inputs: StepInputs) -> DecodeTensors:
    slots = tuple(group.slots for group in inputs.groups)
    return DecodeTensors(inputs.token_ids, inputs.positions, slots, inputs.query_starts, inputs.seq_lens, inputs.rows)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """Whatever it was captured with."""

    calls: Sequence[Callable[[], object]]
    """That replay it."""
    kept: object
    """What they point into."""
    static: StaticInputs
    output: DecoderOutput
    memory_bytes: int
    counts: CollectiveCounts
    """Of the rank, where a replay counts `captured_counts`: no Python runs then."""
    captured_counts: CollectiveCounts | None
    """None: no ranks compute together."""

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        self.static.load(inputs)
        if self.captured_counts is not None:  # first: who waits in a replay is ahead of who does not come to it
            self.counts.add(self.captured_counts)
        for call in self.calls:
            call()
        return self.output


@dataclass(frozen=True, slots=True)
class ToCapture:
    """What is captured, whatever the device, and what its inputs lie over."""

    compute: ComputeStep
    block_tables: Tensor
    max_seq_len: int
    counts: CollectiveCounts = field(default_factory=CollectiveCounts)
    """Of the collectives in `compute`, if there are any."""
    load_inputs: LoadInputs = load_inputs_reference
    """Comes before each replay."""
    extras: Mapping[str, Tensor] = field(default_factory=lambda: NO_EXTRAS)
    """Of all inputs."""

    def static(self, shape: GraphShape) -> StaticInputs:
        return StaticInputs(
            shape.num_requests,
            shape.num_tokens,
            self.block_tables,
            self.max_seq_len,
            shape.max_query_len,
            self.load_inputs,
            self.extras,
        )


class RecordingCapture:
    """Records calls of a library. The recordings share memory: what one leaves is read before the next runs."""

    def __init__(self, library: CDLL, what: ToCapture) -> None:
        self._library = library
        self._what = what
        self._arena = Arena()

    @torch.inference_mode()
    def __call__(self, shape: GraphShape) -> CapturedStep:
        """Raises CaptureError."""
        what, static = self._what, self._what.static(shape)
        num_bytes, before = self._arena.num_bytes, what.counts.copy()
        self._arena.begin()
        with Recorder(self._library, self._arena) as recorder:
            output = what.compute(static.inputs, None)
        try:
            recording = recorder.recording()
        except RecordingError as error:
            raise CaptureError(str(error)) from error
        memory_bytes = self._arena.num_bytes - num_bytes
        counts = what.counts.since(before)
        return CapturedGraph(recording.calls, recording.kept, static, output, memory_bytes, what.counts, counts)


class CudaGraphCapture:
    """Captures in one memory pool: graphs of one `compute` run one at a time, and so may use the same memory. What one
    of them leaves is read while graphs of another run, which have a pool of their own."""

    def __init__(self, what: ToCapture) -> None:
        self._what = what
        self._pool = torch.cuda.graph_pool_handle()
        self._compile_loading()

    @torch.inference_mode()
    def _compile_loading(self) -> None:
        """Of equal and of different requests: nothing else does before a step that clients wait for."""
        for shape in (GraphShape(1, 1), GraphShape(1, 2, max_query_len=3)):
            static = self._what.static(shape)
            static.load(static.inputs)

    @torch.inference_mode()
    def __call__(self, shape: GraphShape) -> CapturedStep:
        """Waits for the device. Raises CaptureError."""
        torch.cuda.empty_cache()  # as capturing does: what it gives back would hide what the graph takes
        free_before = torch.cuda.mem_get_info()[0]
        what, static, graph = self._what, self._what.static(shape), torch.cuda.CUDAGraph()
        try:
            # Compiles kernels and loads libraries, which a capture must not, nor the first replay.
            static.load(static.inputs)
            what.compute(static.inputs, None)
            before = what.counts.copy()
            # Other threads may use the device meanwhile: they copy results and serve transfers.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = what.compute(static.inputs, None)
        except RuntimeError as error:  # torch has no narrower one; running out of memory is one
            raise CaptureError(str(error)) from error
        memory_bytes = max(0, free_before - torch.cuda.mem_get_info()[0])
        counts = what.counts.since(before)
        return CapturedGraph([graph.replay], graph, static, output, memory_bytes, what.counts, counts)


@dataclass(frozen=True, slots=True)
class AgreedStep:
    step: CapturedStep
    memory_bytes: int
    """The most of any rank, so that all run out of memory for graphs at once."""

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        return self.step.replay(inputs)


@dataclass(frozen=True, slots=True)
class AgreedCapture:
    """Captures on all ranks or on none: a rank that ran kernel by kernel what another has no graph of would fall out of
    step with its collectives. Every rank calls it for the same shapes in the same order."""

    capture: Capture
    least: Callable[[int], int]

    def __call__(self, shape: GraphShape) -> AgreedStep:
        """Raises CaptureError on all ranks when one could not."""
        captured, error = self._try(shape)
        num_captured = self.least(0 if captured is None else 1)
        if captured is None or not num_captured:
            raise error or CaptureError("another rank could not capture it")
        return AgreedStep(captured, -self.least(-captured.memory_bytes))

    def _try(self, shape: GraphShape) -> tuple[CapturedStep | None, CaptureError | None]:
        try:
            return self.capture(shape), None
        except CaptureError as error:
            return None, error
