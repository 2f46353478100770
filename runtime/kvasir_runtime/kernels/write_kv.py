"""Writing new keys and values into the paged cache. A slot is block * block_size + offset; -1 writes nothing."""

from collections.abc import Callable
from ctypes import CDLL

import torch

from kvasir_runtime.kernels.native import DTYPE_CODES


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


def cpu_write_kv(
    library: CDLL,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """The compiled cache write, for keys, values and caches of one type whose heads are adjacent."""
    native = library.kvasir_write_kv

    def write_kv(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        code = DTYPE_CODES.get(key.dtype)
        head_dim = key.shape[2]
        adjacent = all(t.stride(2) == 1 and t.stride(1) == head_dim for t in (key, value))
        if code is None or not adjacent or key_cache.dtype != key.dtype or key_cache.stride(2) != head_dim:
            write_kv_reference(key, value, key_cache, value_cache, slots)
            return
        native(
            *(code, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)),
            *(key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(), key.shape[0], key_cache.shape[1]),
            *(key_cache.stride(0), key_cache.stride(1), key.shape[1] * head_dim),
        )

    return write_kv
