"""The compiled rotary embedding agrees with its torch twin."""

import pytest
import torch

from kvasir_runtime.kernels.ops import cpu_ops, reference_ops

CPU, REFERENCE = cpu_ops(), reference_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (64, 32), (96, 24), (128, 128), (256, 64)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_agrees_on_views_of_a_packed_projection(
    tokens: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    angles = torch.outer(torch.arange(500.0), torch.rand(rotary_dim // 2)).repeat(1, 2)
    positions = torch.randint(0, 500, (tokens,))
    packed = torch.randn(tokens, 8 * head_dim).to(dtype)
    results = []
    for ops in (CPU, REFERENCE):
        own = packed.clone()
        query, key, _ = own.split((4 * head_dim, 2 * head_dim, 2 * head_dim), dim=1)
        ops.rotary(
            query.unflatten(1, (4, head_dim)), key.unflatten(1, (2, head_dim)), angles.cos(), angles.sin(), positions
        )
        results.append(own)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
