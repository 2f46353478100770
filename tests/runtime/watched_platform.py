"""A platform whose parts tests choose, and that notes what is captured and which steps run kernel by kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, StepInputs
from kvasir_runtime.execution.graphs import Capture, CapturedStep, GraphShape, RunnerGraphs
from kvasir_runtime.execution.kv_buffer import DeviceMemory
from kvasir_runtime.execution.model_runner import EagerDecoder
from kvasir_runtime.execution.platform import GraphSetup, Platform, platform_of
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.kernels.inputs import StepLengths
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kernels.step_ops import StepOps
from kvasir_runtime.models.decoder import ComputeStep, DecoderOutput

CPU = torch.device("cpu")


class WatchedPlatform(Platform):
    def __init__(
        self,
        device: torch.device = CPU,
        *,
        ops: Ops | None = None,
        step_ops: StepOps | None = None,
        backend: Callable[..., AttentionBackend] | None = None,
        transfers: Transfers | None = None,
        graph_bytes: int | None = None,
        never_waits: bool | None = None,
        make_graphs: Callable[[GraphSetup], RunnerGraphs] | None = None,
    ) -> None:
        """What is not given is the device's own."""
        super().__init__(device)
        self._own = own = platform_of(device)
        self.never_waits = own.never_waits if never_waits is None else never_waits
        self.setups: list[GraphSetup] = []
        self.attempts: list[GraphShape] = []
        """All captures, of the target and of drafts."""
        self.captured: list[tuple[GraphShape, CapturedStep]] = []
        self.target = Target()
        self._ops, self._step_ops, self._transfers = ops, step_ops, transfers
        self._make_backend = backend or own.attention_backend
        self._graph_bytes = graph_bytes
        self._make_graphs = make_graphs or own.graphs

    @property
    def shapes(self) -> list[GraphShape]:
        return sorted((shape for shape, _ in self.captured), key=lambda shape: (shape.num_requests, shape.num_tokens))

    def ops(self) -> Ops:
        return self._ops or self._own.ops()

    def step_ops(self) -> StepOps:
        return self._step_ops or self._own.step_ops()

    def attention_backend(self, *choice: Any) -> AttentionBackend:
        return self._make_backend(*choice)

    def transfers(self) -> Transfers:
        return self._transfers or self._own.transfers()

    def memory(self, *limits: Any) -> DeviceMemory:
        memory = self._own.memory(*limits)
        return memory if self._graph_bytes is None else replace(memory, graph_bytes=self._graph_bytes)

    def graphs(self, setup: GraphSetup) -> Any:
        self.setups.append(setup)
        made = self._make_graphs(setup)
        capture_of = made.capture_of
        made.capture_of = lambda compute: self._noting(compute, capture_of(compute))
        return WatchedGraphs(made, self.target)

    def _noting(self, compute: ComputeStep, capture: Capture) -> Capture:
        def noting(shape: GraphShape) -> CapturedStep:
            self.attempts.append(shape)
            captured = capture(shape)
            self.captured.append((shape, captured))
            return CountedReplays(captured, self.target) if compute in self.target.watched else captured

        return noting


@dataclass
class Target:
    """What became of its steps."""

    watched: list[ComputeStep] = field(default_factory=list)
    lengths: list[StepLengths] = field(default_factory=list)
    """Of steps that were computed kernel by kernel."""
    outputs: list[DecoderOutput] = field(default_factory=list)
    num_replays: int = 0

    def watching(self, compute: ComputeStep) -> ComputeStep:
        def watched(inputs: StepInputs, kept_tokens: Tensor | None, **captures: bool) -> DecoderOutput:
            output = compute(inputs, kept_tokens, **captures)
            self.lengths.append(inputs.lengths)
            self.outputs.append(output)
            return output

        self.watched.append(watched)
        return watched

    def clear(self) -> None:
        self.lengths.clear()
        self.outputs.clear()
        self.num_replays = 0

    @property
    def num_decodes_only(self) -> int:
        """Of the steps in `lengths`."""
        return sum(lengths.num_decodes == len(lengths.query_lens) for lengths in self.lengths)


@dataclass(frozen=True)
class CountedReplays:
    step: CapturedStep
    target: Target

    @property
    def memory_bytes(self) -> int:
        return self.step.memory_bytes

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        self.target.num_replays += 1
        return self.step.replay(inputs)


class WatchedGraphs:
    """A runner's, of its target and of its drafts."""

    def __init__(self, graphs: RunnerGraphs, target: Target) -> None:
        self._graphs = graphs
        self._target = target

    def of(self, eager: ComputeStep, query_lens: Sequence[int]) -> ComputeStep:
        is_target = isinstance(getattr(eager, "func", eager), EagerDecoder)
        return self._graphs.of(self._target.watching(eager) if is_target else eager, query_lens)

    def capture_next(self) -> bool:
        return self._graphs.capture_next()

    def take_warming_up(self) -> bool:
        return self._graphs.take_warming_up()
