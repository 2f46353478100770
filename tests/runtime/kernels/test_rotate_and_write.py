"""The compiled norms, rotation and cache write agree with their torch twin; keys and values land nowhere else."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kvasir_runtime.kernels.native import load_library, warn_of_twin
from kvasir_runtime.kernels.rowwise import (
    cpu_rms_norm,
    cpu_rotate_and_write,
    rms_norm_reference,
    rotary_reference,
    rotate_and_write_reference,
)

LIBRARY = load_library()
assert LIBRARY is not None
NATIVE = cpu_rotate_and_write(LIBRARY)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
NUM_BLOCKS, NUM_POSITIONS = 40, 500


class Written(NamedTuple):
    query: Tensor
    buffer: Tensor  # [NUM_BLOCKS, num_layers, 2, block_size, num_kv_heads, head_dim]
    rest: Tensor  # what lies beside the query and the key in the projection


def rotate(
    kernel: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    tokens: int = 70,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    rotary_dim: int = 64,
    block_size: int = 16,
    weight_dtype: torch.dtype | None = None,
) -> Written:
    """Views of one packed projection, written into the middle one of three layers; every third token's slot is -1."""
    random = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    packed = torch.randn(tokens, (num_heads + 2 * num_kv_heads + 1) * head_dim, generator=random).to(dtype)
    parts = packed.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads, 1), dim=1)
    query, key, value, rest = parts
    angles = torch.outer(torch.arange(float(NUM_POSITIONS)), torch.rand(rotary_dim // 2, generator=random)).repeat(1, 2)
    positions = torch.randint(0, NUM_POSITIONS, (tokens,), generator=random)
    buffer = torch.zeros(NUM_BLOCKS, 3, 2, block_size, num_kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(NUM_BLOCKS * block_size, generator=random)[:tokens]
    slots[2::3] = -1
    weights = (None, None)
    if weight_dtype is not None:
        weights = tuple(torch.randn(2, head_dim, generator=random).to(weight_dtype))
    turned = kernel(
        query, key, value, buffer[:, 1, 0], buffer[:, 1, 1], angles.cos(), angles.sin(), positions, slots, *weights,
        1e-6,
    )  # fmt: skip
    return Written(turned, buffer, torch.cat((value, rest), 1))


def assert_agrees(dtype: torch.dtype, **shape: object) -> None:
    got, expected = rotate(NATIVE, dtype, **shape), rotate(rotate_and_write_reference, dtype, **shape)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.query, expected.query, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got.buffer, expected.buffer, atol=tolerance, rtol=tolerance)
    assert torch.equal(got.buffer[:, 1, 1], expected.buffer[:, 1, 1])
    assert torch.equal(got.rest, expected.rest)
    assert int(got.buffer.flatten(3).any(-1).sum()) == int(expected.buffer.flatten(3).any(-1).sum())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (64, 32), (96, 24), (128, 128), (256, 64)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_agrees_for_every_head_dim_and_partial_rotation(
    tokens: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    assert_agrees(dtype, tokens=tokens, head_dim=head_dim, rotary_dim=rotary_dim)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("is_wide", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_agrees_with_norms_whose_weight_has_the_same_type_or_float32(
    head_dim: int, is_wide: bool, dtype: torch.dtype
) -> None:
    assert_agrees(dtype, head_dim=head_dim, rotary_dim=24, weight_dtype=torch.float32 if is_wide else dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("block_size", [1, 8, 48])
@pytest.mark.parametrize("heads", [(1, 1), (14, 2), (8, 8)], ids=str)
def test_agrees_for_every_block_size_and_ratio_of_heads(
    heads: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    assert_agrees(dtype, heads=heads, block_size=block_size, tokens=30)


def test_float32_is_bit_for_bit_the_separate_norm_and_the_same_for_any_number_of_threads(threads: int) -> None:
    """The steps have roundings of their own; fusing them must not change one."""
    fused = rotate(NATIVE, torch.float32, weight_dtype=torch.float32)

    def separate(query, key, value, key_cache, value_cache, cos, sin, positions, slots, query_weight, key_weight, eps):
        query, key = (cpu_rms_norm(LIBRARY)(x, w, eps) for x, w in ((query, query_weight), (key, key_weight)))
        return NATIVE(query, key, value, key_cache, value_cache, cos, sin, positions, slots, None, None, 0.0)

    apart = rotate(separate, torch.float32, weight_dtype=torch.float32)
    assert torch.equal(fused.query, apart.query)
    assert torch.equal(fused.buffer, apart.buffer)


def test_rotation_turns_pairs_by_the_angle_of_their_position() -> None:
    """Half-split pairs: (1, 0) of the pair at 0 and 2 turns by its angle, the pair at 1 and 3 by its own."""
    heads, angles = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]), torch.tensor([[0.5, 0.25]]).repeat(1, 2)
    rotary_reference(heads, heads.clone(), angles.cos(), angles.sin(), torch.tensor([0]))
    a, b = torch.tensor(0.5), torch.tensor(0.25)
    torch.testing.assert_close(heads[0, 0], torch.stack((a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos())))


def test_a_cache_of_another_type_is_written_by_the_twin_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_twin.cache_clear()
    cache, key = torch.zeros(4, 16, 2, 8, dtype=torch.bfloat16), torch.randn(3, 2, 8)
    tables = torch.ones(50, 8), torch.zeros(50, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            NATIVE(
                key.clone(), key.clone(), key, cache, cache, *tables, torch.arange(3), torch.tensor([5, -1, 40]), None,
                None, 0.0,
            )  # fmt: skip
    assert torch.equal(cache[2, 8], key[2].to(torch.bfloat16))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "rotate_and_write runs as plain torch, several times slower than compiled"
    ]
    assert "the query is torch.float32" in caplog.text
    assert "the cache torch.bfloat16" in caplog.text


def test_the_norm_is_taken_before_the_rotation() -> None:
    """A rotation keeps the head's length, so only the weights show the order."""
    weight = torch.tensor([1.0, 1, 1, 1, 3, 1, 1, 1])
    query = torch.randn(1, 1, 8)
    cos, sin = torch.zeros(1, 8), torch.ones(1, 8)  # a quarter turn: the halves change places
    cache = torch.zeros(1, 1, 1, 8)
    normed = rms_norm_reference(query, weight, 1e-6)
    key = query.clone()
    for kernel in (NATIVE, rotate_and_write_reference):
        turned = kernel(
            query.clone(), key.clone(), key, cache, cache.clone(), cos, sin, torch.tensor([0]), torch.tensor([0]),
            weight, weight, 1e-6,
        )  # fmt: skip
        torch.testing.assert_close(turned, torch.cat((-normed[..., 4:], normed[..., :4]), -1))
        torch.testing.assert_close(cache[0], turned)
