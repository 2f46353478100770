"""Hidden states between pipeline stages as they travel: a line for the step, then one for each of its tokens.

A line is [num_planes, hidden_size]: the residual stream, and what was captured for a proposer. The first line says
whether a stage has failed; it is read with the step's results, so nobody waits for the device on the way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.model_runner import EagerDecoder
from kvasir_runtime.models.decoder import DecoderOutput, HiddenStates, residual_stream


@dataclass(frozen=True, slots=True)
class LineFormat:
    num_planes: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self, num_tokens: int) -> Tensor:
        """[1 + num_tokens, num_planes, hidden_size]"""
        shape = (1 + num_tokens, self.num_planes, self.hidden_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def message(self, lines: Tensor | None, num_tokens: int, failed_stage: Tensor | int) -> Tensor:
        """Of a step planned with so many tokens, of which fewer may have been computed: their lines, as far as they go,
        None of a step that failed. `failed_stage` as `StageBuffer.failed_stage` says."""
        message = self.zeros(num_tokens)
        message[0] = failed_stage
        if lines is not None:
            message[1 : 1 + lines.shape[0], : lines.shape[1]] = lines
        return message


ENTERING = "entering"
"""Of `StepInputs.extras`: states [most tokens, num_planes, hidden_size] that came from the stage before."""


def entering_states(inputs: StepInputs, *, captures: bool) -> HiddenStates | None:
    """Of the step's tokens; copies, which layers may change. Without `captures` nothing captured is read. None on the
    first stage."""
    lines = inputs.extras.get(ENTERING)
    if lines is None:
        return None
    planes = lines[: len(inputs.token_ids)].unbind(1)
    stream, *captured = (plane.clone() for plane in planes[: None if captures else 1])
    return HiddenStates(stream, None, tuple(captured))


class StageBuffer:
    """Where states arrive. It stays where it is, so that graphs may read it."""

    def __init__(self, line_format: LineFormat, max_num_tokens: int) -> None:
        self._lines = line_format.zeros(max_num_tokens)

    def message(self, num_tokens: int) -> Tensor:
        """To receive the states of so many tokens into, [1 + num_tokens, num_planes, hidden_size]."""
        return self._lines[: 1 + num_tokens]

    @property
    def states(self) -> Tensor:
        """The tokens' lines [max_num_tokens, num_planes, hidden_size], for `ENTERING`."""
        return self._lines[1:]

    def failed_stage(self) -> Tensor:
        """int32 [1], a copy: 0 where all stages before have computed the step, else the number of one that has not,
        counted from 1."""
        return self._lines[0, 0, :1].int()


def lines_of(states: HiddenStates) -> Tensor:
    """[num_tokens, num_planes, hidden_size]. The last sublayer's output joins the stream as the next norm would do it,
    rounded to the same type: half the bytes, and no other number."""
    return torch.stack((residual_stream(states.delta, states.residual), *states.captured), 1)


class StageDecoder(EagerDecoder):
    """A pipeline stage's. Before the last the "hidden states" are lines of what leaves it, of all tokens."""

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        attention = self.backend.prepare(inputs)
        captured_layers = self.captured_layers if captures else ()
        entering = entering_states(inputs, captures=captures)
        if self.decoder.norm is None:
            left = self.decoder.states(inputs.token_ids, attention, self.caches, None, captured_layers, entering)
            return DecoderOutput(lines_of(left), ())
        return self.decoder(inputs.token_ids, attention, self.caches, kept_tokens, captured_layers, entering)
