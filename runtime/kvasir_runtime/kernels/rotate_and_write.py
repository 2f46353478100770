"""What happens to query, key and value between their projection and attention, as one kernel: each head's norm where
the architecture has one, the rotary embedding (Su et al. 2021; the half-split style of GPT-NeoX), and the write into
the paged cache.

The first `rotary_dim` numbers of each head turn; the rest pass through. A slot is block * block_size + offset; -1
writes nothing. A quantised cache holds each head's numbers as codes of one byte, which its scale turns back: code *
scale.
"""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES, warn_of_twin
from kvasir_runtime.kernels.rms_norm import rms_norm_reference


def rotate_and_write_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write key and value [T, Hk, D] to their slots and return the turned query [T, Hq, D].

    With weights [D] each head is normalised first, and the query is a new tensor; else it is changed in place, as the
    key always may be. Tables, positions, slots and scales are those of `rotary_reference` and `write_kv_reference`.
    """
    if query_weight is not None and key_weight is not None:
        query, key = rms_norm_reference(query, query_weight, eps), rms_norm_reference(key, key_weight, eps)
    rotary_reference(query, key, cos, sin, positions)
    write_kv_reference(key, value, key_cache, value_cache, slots, key_scale, value_scale)
    return query


def cpu_rotate_and_write(library: CDLL) -> Callable[..., torch.Tensor]:
    """The compiled kernel, with the reference's arguments. Query and key, often views into one packed projection, are
    changed in place; what it cannot read goes to the reference."""
    native = library.kvasir_rotate_and_write

    def rotate_and_write(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        weight = query if query_weight is None else query_weight
        if not _is_compiled(query, key, value, key_cache, weight):
            warn_of_twin("rotate_and_write", _words(query, key_cache, weight))
            return rotate_and_write_reference(
                query, key, value, key_cache, value_cache, cos, sin, positions, slots, query_weight, key_weight, eps
            )
        num_tokens, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        native(
            DTYPE_CODES[query.dtype], DTYPE_CODES[weight.dtype],
            query.data_ptr(), query.stride(0), num_heads, key.data_ptr(), key.stride(0),
            value.data_ptr(), value.stride(0), num_kv_heads, head_dim,
            None if query_weight is None else query_weight.data_ptr(),
            None if key_weight is None else key_weight.data_ptr(), eps,
            cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[1] // 2,
            key_cache.data_ptr(), value_cache.data_ptr(), block_size, key_cache.stride(0), key_cache.stride(1),
            slots.data_ptr(), num_tokens,
        )  # fmt: skip
        return query

    return rotate_and_write


def _is_compiled(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, weight: torch.Tensor
) -> bool:
    """Called for each layer, so it asks only for what may differ between models."""
    dtype, head_dim = query.dtype, query.shape[2]
    has_types = dtype in DTYPE_CODES and key_cache.dtype == dtype and weight.dtype in (torch.float32, dtype)
    if not has_types or key_cache.stride(2) != head_dim:
        return False
    return query.stride(1) == head_dim and key.stride(1) == head_dim and value.stride(1) == head_dim


def _words(query: torch.Tensor, key_cache: torch.Tensor, weight: torch.Tensor) -> str:
    """What cannot be read, for the log."""
    return (
        f"the query is {query.dtype} with strides {query.stride()}, the cache {key_cache.dtype} with strides "
        f"{key_cache.stride()}, the norm's weight {weight.dtype}"
    )


def rotary_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Turn query [T, Hq, D] and key [T, Hk, D] in place by their positions int64 [T].

    cos and sin are float32 [max_position, R], the second half of the columns equal to the first: number i of a head
    turns with number i + R / 2 by the angle of column i.
    """
    half = cos.shape[-1] // 2
    turn_cos = cos[positions, :half].unsqueeze(1)  # [T, 1, R / 2]
    turn_sin = sin[positions, :half].unsqueeze(1)
    for heads in (query, key):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        turned = (first * turn_cos - second * turn_sin, second * turn_cos + first * turn_sin)
        heads[..., :half], heads[..., half : 2 * half] = turned[0].to(heads.dtype), turned[1].to(heads.dtype)


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Store key and value [T, Hk, D] at slots int64 [T] of the caches [num_blocks, block_size, Hk, D], any strides;
    of quantised ones with scales float32 [num_blocks, block_size, Hk]."""
    block_size = key_cache.shape[1]
    kept = slots >= 0
    blocks = slots[kept] // block_size
    offsets = slots[kept] % block_size
    for numbers, cache, scale in ((key[kept], key_cache, key_scale), (value[kept], value_cache, value_scale)):
        if scale is None:
            cache[blocks, offsets] = numbers.to(cache.dtype)
        else:
            cache[blocks, offsets], scale[blocks, offsets] = quantise(numbers, cache.dtype)


def quantise(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., D] of numbers [..., D], and scales float32 [...]: the largest of D becomes the type's largest."""
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    wide = numbers.float()
    scale = wide.abs().amax(-1) / largest
    codes = wide / torch.where(scale > 0, scale, 1.0)[..., None]
    codes = codes.clamp(-largest, largest)  # a scale too small to be exact
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale
