"""Writing new keys and values into the paged cache. A slot is block * block_size + offset; -1 writes nothing.

A quantised cache holds each head's numbers as codes of one byte, which its scale turns back: code * scale.
"""

import torch


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
