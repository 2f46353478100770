"""Writing new keys and values into the paged cache. A slot is block * block_size + offset; -1 writes nothing."""

import torch


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store key and value [T, Hk, D] at slots int64 [T] of the caches [num_blocks, block_size, Hk, D], any strides."""
    block_size = key_cache.shape[1]
    kept = slots >= 0
    blocks = slots[kept] // block_size
    offsets = slots[kept] % block_size
    key_cache[blocks, offsets] = key[kept].to(key_cache.dtype)
    value_cache[blocks, offsets] = value[kept].to(value_cache.dtype)
