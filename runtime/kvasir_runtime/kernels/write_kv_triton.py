"""Writing keys and values into their slots of the paged cache, in Triton; the torch twin is `write_kv_reference`."""

import torch
import triton
import triton.language as tl


def triton_write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As `write_kv_reference`; key and value caches have equal strides."""
    num_tokens, num_heads, head_dim = key.shape
    _write_kv_kernel[(num_tokens, num_heads)](
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1), key_cache, value_cache,
        key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), slots, head_dim,
        PAGE=key_cache.shape[1], PADDED=triton.next_power_of_2(head_dim),
    )  # fmt: skip


@triton.jit
def _write_kv_kernel(
    key, key_token_stride, key_head_stride, value, value_token_stride, value_head_stride, key_cache, value_cache,
    page_stride, slot_stride, head_stride, slots, head_dim, PAGE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (token, head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dims = tl.arange(0, PADDED)
    inside = dims < head_dim
    place = (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride + head * head_stride + dims
    new_key = tl.load(key + token * key_token_stride + head * key_head_stride + dims, mask=inside)
    new_value = tl.load(value + token * value_token_stride + head * value_head_stride + dims, mask=inside)
    tl.store(key_cache + place, new_key.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(value_cache + place, new_value.to(value_cache.dtype.element_ty), mask=inside)
