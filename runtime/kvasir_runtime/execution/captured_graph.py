"""A captured step over inputs that stay where they are, whatever it was captured with."""

from dataclasses import dataclass
from typing import Protocol

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.static_inputs import StaticInputs
from kvasir_runtime.models.decoder import DecoderOutput
from kvasir_runtime.parallel.counts import CollectiveCounts


class Graph(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: Graph
    static: StaticInputs
    output: DecoderOutput
    memory_bytes: int
    counts: CollectiveCounts
    """Of the rank, where a replay counts `captured_counts`: no Python runs then."""
    captured_counts: CollectiveCounts

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        self.static.load(inputs)
        self.counts.add(self.captured_counts)  # first: who waits in a replay is ahead of who does not come to it
        self.graph.replay()
        return self.output
