"""The compiled gated activations agree with their torch twins, also far out where exponentials overflow."""

import pytest
import torch

from kvasir_runtime.kernels.ops import cpu_ops, reference_ops

CPU, REFERENCE = cpu_ops(), reference_ops()


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 2048), (3, 24), (5, 17), (40, 3072)], ids=str)
def test_agrees(shape: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1]).mul(4).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    got, expected = getattr(CPU, name)(gate_up), getattr(REFERENCE, name)(gate_up)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_large_gates_neither_overflow_nor_turn_into_nan(name: str) -> None:
    gates = torch.tensor([-1e30, -1e4, -200.0, -88.0, 88.0, 200.0, 1e4, 1e9])
    gate_up = torch.cat((gates, torch.ones(8))).unsqueeze(0)
    torch.testing.assert_close(getattr(CPU, name)(gate_up), getattr(REFERENCE, name)(gate_up), atol=1e-6, rtol=1e-5)
