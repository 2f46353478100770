"""What CUDA graphs do, without a device: the computation over static inputs, padding included."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvasir_runtime.attention.backend import NO_EXTRAS, StepInputs
from kvasir_runtime.execution.captures import StaticInputs
from kvasir_runtime.execution.graphs import Capture, GraphMemory, GraphShape, RunnerGraphs
from kvasir_runtime.models.decoder import ComputeStep, DecoderOutput


class PaddedStep:
    def __init__(
        self,
        compute: ComputeStep,
        shape: GraphShape,
        tables: Tensor,
        max_seq_len: int,
        memory_bytes: int,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.static = StaticInputs(
            shape.num_requests, shape.num_tokens, tables, max_seq_len, shape.max_query_len, extras=extras
        )
        self._compute = compute
        self.num_replays = 0

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        self.num_replays += 1
        self.static.load(inputs)
        return self._compute(self.static.inputs, None)


class PaddedGraphs(RunnerGraphs):
    """`steps` are those captured, in their order."""

    def __init__(
        self,
        tables: Tensor,
        max_seq_len: int,
        sizes: Sequence[int],
        num_bytes: int = 10**6,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        super().__init__(self._capture_of, sizes, GraphMemory(num_bytes))
        self.steps: list[tuple[GraphShape, PaddedStep]] = []
        self._tables, self._max_seq_len, self._extras = tables, max_seq_len, extras

    def _capture_of(self, compute: ComputeStep) -> Capture:
        def capture(shape: GraphShape) -> PaddedStep:
            step = PaddedStep(compute, shape, self._tables, self._max_seq_len, memory_bytes=100, extras=self._extras)
            self.steps.append((shape, step))
            return step

        return capture

    def capture_all(self) -> None:
        while self.capture_next():
            pass
