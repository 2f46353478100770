"""The decoder's small Triton kernels against their torch twins."""

from collections.abc import Callable

import pytest
import torch
from tests.runtime.kernels.triton_device import DEVICE, DTYPES, GPU_MARKS, TOLERANCES, randn
from torch import Tensor

from kvasir_runtime.kernels.activation_triton import triton_gelu_tanh_and_mul, triton_silu_and_mul
from kvasir_runtime.kernels.rms_norm_triton import triton_add_rms_norm, triton_rms_norm
from kvasir_runtime.kernels.rotate_and_write_triton import triton_rotate_and_write
from kvasir_runtime.kernels.rowwise import (
    add_rms_norm_reference,
    gelu_tanh_and_mul_reference,
    rms_norm_reference,
    rotate_and_write_reference,
    silu_and_mul_reference,
)

pytestmark = GPU_MARKS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_agrees_on_rows_and_on_strided_heads(dtype: torch.dtype) -> None:
    weight = randn(48)
    packed = randn(5, 3, 96, dtype=dtype)
    for x in (packed[:, 0, :48], packed[:, :, 48:]):
        torch.testing.assert_close(
            triton_rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), **TOLERANCES[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_agrees_and_adds_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 80, dtype=dtype), randn(5, 80, dtype=dtype), randn(80, dtype=dtype)
    expected = add_rms_norm_reference(x, residual.clone(), weight, 1e-6)
    got = triton_add_rms_norm(x, residual, weight, 1e-6)
    assert got[1] is residual
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "twin"),
    [(triton_silu_and_mul, silu_and_mul_reference), (triton_gelu_tanh_and_mul, gelu_tanh_and_mul_reference)],
)
def test_gated_activations_agree(
    dtype: torch.dtype, kernel: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor]
) -> None:
    gate_up = randn(3, 2 * 1100, dtype=dtype)
    torch.testing.assert_close(kernel(gate_up), twin(gate_up), **TOLERANCES[dtype])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("rotary_dim", "dtype"), [(24, torch.float32), (16, torch.float32), (24, torch.bfloat16)])
def test_heads_are_normalised_turned_and_written_as_by_the_twin(
    rotary_dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    num_heads, head_dim, page = 3, 24, 16
    packed = randn(5, num_heads + 2 + 2, head_dim, dtype=dtype)
    angles = randn(50, rotary_dim // 2).repeat(1, 2)
    positions = torch.tensor([0, 49, 7, 8, 9], device=DEVICE)
    slots = torch.tensor([5, -1, 47, 16, 0], device=DEVICE)
    norms = (randn(head_dim, dtype=dtype), randn(head_dim), 1e-6) if has_norms else (None, None, 0.0)
    queries, buffers = [], []
    for kernel in (triton_rotate_and_write, rotate_and_write_reference):
        query, key, value = packed.clone().split([num_heads, 2, 2], dim=1)
        buffer = torch.zeros(4, 3, 2, page, 2, head_dim, dtype=dtype, device=DEVICE)
        key_cache, value_cache = buffer[:, 1, 0], buffer[:, 1, 1]
        queries.append(
            kernel(query, key, value, key_cache, value_cache, angles.cos(), angles.sin(), positions, slots, *norms)
        )
        buffers.append(buffer)
    # Rounded to bfloat16 after the norm and after the turn: two units in the last place.
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else TOLERANCES[dtype]
    torch.testing.assert_close(*queries, **tolerance)
    torch.testing.assert_close(*buffers, **tolerance)
    assert buffers[0].count_nonzero() == 4 * 2 * 2 * head_dim


def test_the_query_and_key_given_stay_as_they_were() -> None:
    """They may be views of one projection that another thread of the kernel still reads."""
    packed = randn(2, 6, 16)
    before = packed.clone()
    query, key, value = packed.split([2, 2, 2], dim=1)
    caches = torch.zeros(2, 1, 4, 2, 16, device=DEVICE)
    positions, slots = torch.tensor([3, 4], device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    turned = triton_rotate_and_write(
        query, key, value, caches[0], caches[1], randn(8, 16), randn(8, 16), positions, slots, None, None, 0.0
    )
    assert torch.equal(packed, before)
    assert not torch.equal(turned, query)
