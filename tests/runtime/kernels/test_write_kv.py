"""Keys and values land in their slots and nowhere else."""

import pytest
import torch

from kvasir_runtime.kernels.ops import cpu_ops, reference_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 200])
def test_agrees_and_skips_slots_of_minus_one(tokens: int, block_size: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(40, 3, 2, block_size, 2, 64, dtype=dtype)
    packed = torch.randn(tokens, 8 * 64).to(dtype)
    key, value = packed[:, 256:384].view(tokens, 2, 64), packed[:, 384:].view(tokens, 2, 64)
    slots = torch.randperm(40 * block_size)[:tokens]
    slots[tokens // 2 :: 3] = -1
    results = []
    for ops in (cpu_ops(), reference_ops()):
        own = buffer.clone()
        ops.write_kv(key, value, own[:, 1, 0], own[:, 1, 1], slots)
        results.append(own)
    assert torch.equal(*results)
    assert int(results[0][:, 1, 0].flatten(2).any(-1).sum()) == int((slots >= 0).sum())


def test_a_cache_of_another_type_is_written_by_the_reference() -> None:
    cache = torch.zeros(4, 16, 2, 8, dtype=torch.bfloat16)
    key = torch.randn(3, 2, 8)
    cpu_ops().write_kv(key, key, cache, cache, torch.tensor([5, -1, 40]))
    assert torch.equal(cache[2, 8], key[2].to(torch.bfloat16))
