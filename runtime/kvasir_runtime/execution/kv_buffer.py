"""How many KV-cache blocks a rank gets, and the one buffer that holds them.

Blocks are contiguous across layers, so that swapping, offloading or sending one is a single copy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.config import CacheConfig
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kernels.huge_pages import use_huge_pages
from kvasir_runtime.models.options import DecoderOptions

DEFAULT_CPU_BYTES = 4 * 1024**3
DEFAULT_SHARE = {"cuda": 0.9, "cpu": 0.5}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a rank may plan with."""

    device_type: str
    limit_bytes: int
    used_bytes: int
    """By weights and by the largest step's activations."""


def block_bytes(options: DecoderOptions, block_size: int, dtype: torch.dtype) -> int:
    return options.num_layers * 2 * block_size * options.num_kv_heads * options.head_dim * dtype.itemsize


def num_kv_blocks(
    cache: CacheConfig, bytes_per_block: int, memory: DeviceMemory, *, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks to allocate. Raises ConfigurationError when not even one sequence of max_model_len tokens fits."""
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = _cache_bytes(cache, memory) // bytes_per_block
        if _is_cpu_default(cache, memory):
            num_blocks = min(num_blocks, max_num_seqs * -(-max_model_len // cache.block_size))
    num_needed = -(-max_model_len // cache.block_size)
    if num_blocks < num_needed:
        fitting = max(0, num_blocks) * cache.block_size
        raise ConfigurationError(
            f"the KV cache holds {max(0, num_blocks)} blocks of {cache.block_size} tokens, but one request of "
            f"max_model_len {max_model_len} needs {num_needed}: lower --max-model-len to {fitting}, or give the cache "
            f"more with --kv-cache-memory-bytes (one request takes {num_needed * bytes_per_block} bytes), "
            "--gpu-memory-utilization or --num-gpu-blocks-override"
        )
    return num_blocks


def allocate_kv_cache(
    options: DecoderOptions, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. CPU memory is taken on first use."""
    shape = (num_blocks, options.num_layers, 2, block_size, options.num_kv_heads, options.head_dim)
    return use_huge_pages(torch.empty(shape, dtype=dtype, device=device))


def _cache_bytes(cache: CacheConfig, memory: DeviceMemory) -> int:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    share = cache.gpu_memory_utilization
    share = DEFAULT_SHARE[memory.device_type] if share is None else share
    free = max(0, int(memory.limit_bytes * share) - memory.used_bytes)
    return min(free, DEFAULT_CPU_BYTES) if _is_cpu_default(cache, memory) else free


def _is_cpu_default(cache: CacheConfig, memory: DeviceMemory) -> bool:
    """On CPU memory is shared with others, so without a word from the user no more is taken than can be needed."""
    return memory.device_type == "cpu" and cache.gpu_memory_utilization is None and cache.kv_cache_memory_bytes is None
