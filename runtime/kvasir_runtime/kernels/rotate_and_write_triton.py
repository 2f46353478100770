"""Head norms, rotary embedding and the cache write in Triton; the torch twin is `rotate_and_write_reference`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvasir_runtime.kernels.dependent_launch_triton import let_next_start, wait_for_previous
from kvasir_runtime.kernels.launches import Launcher


def triton_rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """As `rotate_and_write_reference`, but the query returned is always a new tensor and the key stays as it was.

    Both caches have the same strides, and so have cos and sin.
    """
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    _launch_rotate_and_write(
        (num_tokens, num_heads + key.shape[1]),
        out, query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
        value, value.stride(0), value.stride(1),
        key_cache, value_cache, key_cache.stride(0), key_cache.stride(1), key_cache.stride(2),
        slots, positions, cos, sin, cos.stride(0), query_weight, key_weight, eps, num_heads,
        HEAD_DIM=head_dim, PADDED_DIM=triton.next_power_of_2(head_dim), ROTARY_DIM=cos.shape[1],
        PAGE=key_cache.shape[1], NORMALISES=query_weight is not None, num_warps=1 if head_dim <= 128 else 2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])  # of a part of a step
def _rotate_and_write_kernel(
    out, query, query_token_stride, query_head_stride, key, key_token_stride, key_head_stride,
    value, value_token_stride, value_head_stride, key_cache, value_cache, page_stride, slot_stride, cache_head_stride,
    slots, positions, cos, sin, table_stride, query_weight, key_weight, eps, num_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAGE: tl.constexpr,
    NORMALISES: tl.constexpr,
):  # fmt: skip
    """Program (token, head of the query, then of the key and value)."""
    wait_for_previous()
    let_next_start()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    if head < num_heads:
        place = query + token * query_token_stride + head * query_head_stride
        turned = _turn(
            place, query_weight, eps, cos, sin, tl.load(positions + token) * table_stride,
            HEAD_DIM, PADDED_DIM, ROTARY_DIM, NORMALISES,
        )  # fmt: skip
        tl.store(out + (token * num_heads + head) * HEAD_DIM + dims, turned, mask=is_dim)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            head -= num_heads
            place = key + token * key_token_stride + head * key_head_stride
            turned = _turn(
                place, key_weight, eps, cos, sin, tl.load(positions + token) * table_stride,
                HEAD_DIM, PADDED_DIM, ROTARY_DIM, NORMALISES,
            )  # fmt: skip
            target = (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + head * cache_head_stride + dims
            tl.store(key_cache + target, turned.to(key_cache.dtype.element_ty), mask=is_dim)
            kept = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=is_dim)
            tl.store(value_cache + target, kept.to(value_cache.dtype.element_ty), mask=is_dim)


@triton.jit
def _turn(
    place, weight, eps, cos, sin, angles,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, NORMALISES: tl.constexpr,
):  # fmt: skip
    """One head, in its own type: number i turns with its partner, i + ROTARY_DIM / 2; the rest passes through.

    Own numbers and partners are read apart, so that nothing is exchanged between threads.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    dims = tl.arange(0, PADDED_DIM)
    is_dim, turns = dims < HEAD_DIM, dims < 2 * HALF
    partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    own = tl.load(place + dims, mask=is_dim, other=0.0).to(tl.float32)
    partner = tl.load(place + partners, mask=turns, other=0.0).to(tl.float32)
    if NORMALISES:
        scale = 1.0 / tl.sqrt(tl.sum(own * own, 0) / HEAD_DIM + eps)
        own = own * scale * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        partner = partner * scale * tl.load(weight + partners, mask=turns, other=0.0).to(tl.float32)
        own = own.to(place.dtype.element_ty).to(tl.float32)  # rounded where the twin rounds
        partner = partner.to(place.dtype.element_ty).to(tl.float32)
    turn_cos = tl.load(cos + angles + dims, mask=turns, other=1.0)
    turn_sin = tl.load(sin + angles + dims, mask=turns, other=0.0)
    turned = own * turn_cos + tl.where(dims < HALF, -partner, partner) * turn_sin
    return turned.to(place.dtype.element_ty)


_launch_rotate_and_write = Launcher(_rotate_and_write_kernel, starts_early=True)
