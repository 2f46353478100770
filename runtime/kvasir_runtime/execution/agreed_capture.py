"""Captures on all ranks or on none: a rank that ran kernel by kernel what another has no graph of would fall out of
step with its collectives."""

from collections.abc import Callable
from dataclasses import dataclass

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.graphs import Capture, CapturedStep, CaptureError, GraphShape
from kvasir_runtime.models.decoder import DecoderOutput


@dataclass(frozen=True, slots=True)
class AgreedStep:
    step: CapturedStep
    memory_bytes: int
    """The most of any rank, so that all run out of memory for graphs at once."""

    def replay(self, inputs: StepInputs) -> DecoderOutput:
        return self.step.replay(inputs)


@dataclass(frozen=True, slots=True)
class AgreedCapture:
    """Every rank calls it for the same shapes in the same order."""

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
