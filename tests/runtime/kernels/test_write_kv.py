"""Quantised keys and values are as close as their type allows, and lie in their slots alone."""

import pytest
import torch

from kvasir_runtime.kernels.paged_attention import paged_attention_reference
from kvasir_runtime.kernels.rowwise import quantise, write_kv_reference

TYPES = [torch.int8, torch.float8_e4m3fn]


def numbers(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """[num_tokens, 2, 16], heads and tokens of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(num_tokens, 2, 1, generator=random) - 3)
    return torch.randn(num_tokens, 2, 16, generator=random) * sizes


def test_int8_is_off_by_half_a_step_at_most() -> None:
    original = numbers(200)
    codes, scales = quantise(original, torch.int8)
    assert torch.equal(codes.abs().amax(-1), torch.full((200, 2), 127, dtype=torch.int8))
    off = (codes.float() * scales[..., None] - original).abs()
    assert (off <= original.abs().amax(-1, keepdim=True) / 254 * 1.0001).all()


def test_fp8_is_off_by_half_of_its_last_bit_at_most() -> None:
    """Three bits of mantissa; below 2^-6 of codes the step is 2^-9."""
    original = numbers(200)
    codes, scales = quantise(original, torch.float8_e4m3fn)
    assert (codes.float().abs().amax(-1) == 448).all()
    off = (codes.float() * scales[..., None] - original).abs()
    assert (off <= torch.maximum(original.abs() / 16, scales[..., None] / 2**10) * 1.0001).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_a_scale_cannot_tell_stays_zero_small_or_nan(dtype: torch.dtype) -> None:
    original = torch.tensor([[0.0] * 4, [2e-43, -2e-43, 0, 1e-44], [1.0, 2.0, torch.nan, 3.0]])
    codes, scales = quantise(original, dtype)
    zero, small, nan = codes.float() * scales[:, None]
    assert torch.equal(zero, torch.zeros(4))
    assert (small - original[1]).abs().max() <= original[1].abs().max()
    assert nan.isnan().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_slots_alone_are_written(dtype: torch.dtype) -> None:
    key, value = numbers(3), numbers(3, seed=1)
    caches = [torch.zeros(4, 2, 2, 16, dtype=dtype) for _ in range(2)]
    scales = [torch.full((4, 2, 2), -1.0) for _ in range(2)]
    write_kv_reference(key, value, *caches, torch.tensor([6, -1, 1]), *scales)
    for original, cache, scale in zip((key, value), caches, scales, strict=True):
        for token, place in ((0, (3, 0)), (2, (0, 1))):
            codes, expected = quantise(original[token], dtype)
            assert torch.equal(cache[place].float(), codes.float())
            assert torch.equal(scale[place], expected)
        assert int((scale == -1).sum()) == 2 * 6
        assert int((cache.float() == 0).all(-1).sum()) == 2 * 6


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_reads_codes_times_scales(dtype: torch.dtype, window: int | None) -> None:
    """Two requests in pages of two tokens; what they do not see has scales of NaN."""
    caches = [torch.zeros(6, 2, 2, 16, dtype=dtype) for _ in range(2)]
    scales = [torch.full((6, 2, 2), torch.nan) for _ in range(2)]
    slots = torch.tensor([10, 11, 2, 3, 8, 6, 7, 4])  # pages 5, 1, 4 and 3, 2
    write_kv_reference(numbers(8), numbers(8, seed=1), *caches, slots, *scales)
    table = torch.tensor([[5, 1, 4], [3, 2, 0]], dtype=torch.int32)
    query = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(2))
    step = (torch.tensor([0, 2, 3]), torch.tensor([5, 3]), table, torch.tensor([0, 1]), 0.01, window, None)
    plain = [cache.float() * scale[..., None] for cache, scale in zip(caches, scales, strict=True)]
    expected = paged_attention_reference(query, *plain, *step, torch.empty_like(query))
    assert not expected.isnan().any()
    assert torch.equal(paged_attention_reference(query, *caches, *step, torch.empty_like(query), *scales), expected)
