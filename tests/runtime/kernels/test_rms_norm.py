"""The compiled norms agree with their torch twins."""

import logging

import pytest
import torch

from kvasir_runtime.kernels.native import warn_of_twin
from kvasir_runtime.kernels.ops import cpu_ops, reference_ops

CPU, REFERENCE = cpu_ops(), reference_ops()
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
TYPES += [(torch.float16, torch.float16), (torch.float16, torch.float32)]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[a.dtype]
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("width", [8, 24, 64, 100, 768, 1024])
@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_rms_norm_agrees(rows: int, width: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight = torch.randn(rows, width).to(types[0]), torch.randn(width).to(types[1])
    close(CPU.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_heads_inside_a_packed_projection_are_normalised_one_by_one(types: tuple[torch.dtype, torch.dtype]) -> None:
    packed, weight = torch.randn(50, 8 * 64).to(types[0]), torch.randn(64).to(types[1])
    heads = packed[:, 128:384].view(50, 4, 64)
    close(CPU.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 768), (5, 24), (70, 768)], ids=str)
def test_add_rms_norm_agrees_and_adds_in_place(shape: tuple[int, int], types: tuple[torch.dtype, torch.dtype]) -> None:
    x, residual = (torch.randn(shape).to(types[0]) for _ in range(2))
    weight, expected_residual = torch.randn(shape[1]).to(types[1]), residual.clone()
    expected, _ = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-6)
    got, returned = CPU.add_rms_norm(x, residual, weight, 1e-6)
    assert returned is residual
    assert torch.equal(residual, expected_residual)
    close(got, expected)


def test_other_types_fall_back_to_the_twin_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_twin.cache_clear()
    x, weight = torch.randn(3, 16).double(), torch.randn(16).double()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(CPU.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    assert len(caplog.records) == 1
    assert "rms_norm runs as plain torch, several times slower than compiled: x is torch.float64" in caplog.text
