"""Hidden states on their way between stages: what is packed is what arrives."""

import pytest
import torch

from kvasir_runtime.execution.captures import StaticInputs
from kvasir_runtime.execution.stage_buffer import ENTERING, LineFormat, StageBuffer, entering_states, lines_of
from kvasir_runtime.models.decoder import HiddenStates


def states(num_tokens: int, num_captured: int, dtype: torch.dtype) -> HiddenStates:
    generator = torch.Generator().manual_seed(num_tokens)
    delta, residual, *captured = torch.randn((2 + num_captured, num_tokens, 6), generator=generator).to(dtype)
    return HiddenStates(delta, residual, tuple(captured))


def read(buffer: StageBuffer, num_tokens: int, *, captures: bool = False) -> HiddenStates:
    static = StaticInputs(num_tokens, num_tokens, torch.zeros((1, 1, 1)), 8, extras={ENTERING: buffer.states})
    arrived = entering_states(static.inputs, captures=captures)
    assert arrived is not None
    return arrived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_planned"), [(1, 1), (3, 5), (8, 8)])
def test_states_arrive_as_they_were(num_tokens: int, num_planned: int, dtype: torch.dtype) -> None:
    line_format = LineFormat(2, 6, dtype, torch.device("cpu"))
    buffer, left = StageBuffer(line_format, 8), states(num_tokens, 1, dtype)
    buffer.message(num_planned).copy_(line_format.message(lines_of(left), num_planned, 0))
    arrived = read(buffer, num_tokens, captures=True)
    assert torch.equal(arrived.delta, left.residual + left.delta)
    assert arrived.residual is None
    assert torch.equal(arrived.captured[0], left.captured[0])
    assert buffer.failed_stage().tolist() == [0]


def test_what_was_not_captured_is_not_read() -> None:
    line_format = LineFormat(2, 6, torch.float32, torch.device("cpu"))
    buffer, left = StageBuffer(line_format, 4), states(2, 0, torch.float32)
    buffer.message(2).copy_(line_format.message(lines_of(left), 2, 0))
    assert read(buffer, 2).captured == ()


def test_layers_may_change_what_they_are_given() -> None:
    buffer = StageBuffer(LineFormat(1, 6, torch.float32, torch.device("cpu")), 4)
    read(buffer, 1).delta.add_(1)
    assert read(buffer, 1).delta.tolist() == [[0.0] * 6]


def test_a_failed_step_is_marked_and_otherwise_zeros() -> None:
    line_format = LineFormat(1, 6, torch.bfloat16, torch.device("cpu"))
    buffer = StageBuffer(line_format, 4)
    buffer.message(3).copy_(line_format.message(None, 3, 7))
    failed_stage = buffer.failed_stage()
    buffer.message(3).copy_(line_format.message(None, 3, 0))
    assert failed_stage.tolist() == [7], "a copy: the next step's message comes before the result is read"
    assert not read(buffer, 3).delta.any()
