"""How many pages of KV cache a rank gets, the one buffer that holds them, and each layer's views into it.

A page is one block of all layers of a KV group, contiguous, so that swapping, offloading or sending it is one copy.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import LayerCache
from kvasir_runtime.config import CacheConfig
from kvasir_runtime.kernels.huge_pages import use_huge_pages
from kvasir_runtime.kv_cache.spec import KvLayout, KvPlace, KvSpec

DEFAULT_CPU_BYTES = 4 * 1024**3
"""Where one sequence does not take more; pages that are never used take no memory."""
DEFAULT_SHARE = {"cuda": 0.9, "cpu": 0.5}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a rank may plan with."""

    device_type: str
    limit_bytes: int
    used_bytes: int
    """By weights and by what the largest steps take while they run."""
    graph_bytes: int = 0
    """Of those, what graphs may take."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


def blocks_of_sequence(layout: KvLayout, num_tokens: int, max_num_batched_tokens: int) -> int:
    """Most blocks that a sequence of so many tokens holds at once, over all groups."""
    num_full = -(-num_tokens // layout.block_size)
    return sum(group.reach.most_blocks(num_full, max_num_batched_tokens, layout.block_size) for group in layout.groups)


def num_kv_blocks(cache: CacheConfig, layout: KvLayout, memory: DeviceMemory, limits: SequenceLimits) -> int:
    """Blocks to allocate."""
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    one_sequence = blocks_of_sequence(layout, limits.max_model_len, limits.max_num_batched_tokens)
    num_blocks = _cache_bytes(cache, memory, one_sequence * layout.page_bytes) // layout.page_bytes
    return min(num_blocks, limits.max_num_seqs * one_sequence) if _is_cpu_default(cache, memory) else num_blocks


def longest_sequence(layout: KvLayout, num_blocks: int, limits: SequenceLimits) -> int:
    """Tokens of the longest sequence that so many blocks hold: max_model_len, or whole blocks of fewer."""

    def needs(num_tokens: int) -> int:
        return blocks_of_sequence(layout, num_tokens, limits.max_num_batched_tokens)

    if needs(limits.max_model_len) <= num_blocks:
        return limits.max_model_len
    lengths = range(0, limits.max_model_len, layout.block_size)
    return lengths[bisect.bisect_right(lengths, num_blocks, key=needs) - 1]


def allocate_kv_buffer(layout: KvLayout, num_blocks: int, device: torch.device) -> Tensor:
    """uint8 [num_blocks, page_bytes]. CPU memory is taken on first use."""
    return use_huge_pages(torch.empty((num_blocks, layout.page_bytes), dtype=torch.uint8, device=device))


def copy_blocks(buffer: Tensor, copies: NDArray[np.int32]) -> None:
    """Sources and targets [m, 2], one after the other: a later copy may read what an earlier one wrote."""
    for source, target in copies.tolist():
        buffer[target].copy_(buffer[source])


def layer_caches(layout: KvLayout, specs: Sequence[KvSpec], buffer: Tensor) -> list[LayerCache]:
    """Each spec's views into the buffer."""
    return [
        _layer_cache(layout.block_size, spec, place, buffer) for spec, place in zip(specs, layout.places, strict=True)
    ]


def _layer_cache(block_size: int, spec: KvSpec, place: KvPlace, buffer: Tensor) -> LayerCache:
    """Scales first, so that they lie on their own multiples, whatever the heads' size; a latent layer has one vector
    for keys and values."""
    sizes = [block_size * spec.num_kv_heads * head_bytes for head_bytes in spec.head_parts]
    parts = torch.split(buffer[:, place.offset_bytes : place.offset_bytes + sum(sizes)], sizes, dim=1)
    heads, dtype = (len(buffer), block_size, spec.num_kv_heads), getattr(torch, spec.dtype)
    tensors = [
        part.view(dtype).view(*heads, dim) for part, dim in zip(parts[-spec.num_tensors :], spec.head_dims, strict=True)
    ]
    scales: list[torch.Tensor | None] = [
        part.view(torch.float32).view(heads) for part in parts[: -spec.num_tensors]
    ] or [None]
    return LayerCache(tensors[0], tensors[-1], place.group, scales[0], scales[-1])


def _cache_bytes(cache: CacheConfig, memory: DeviceMemory, sequence_bytes: int) -> int:
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    free = max(0, usable_bytes(cache, memory) - memory.used_bytes)
    return min(free, max(DEFAULT_CPU_BYTES, sequence_bytes)) if _is_cpu_default(cache, memory) else free


def usable_bytes(cache: CacheConfig, memory: DeviceMemory) -> int:
    """By weights, steps and KV cache together."""
    if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
        return memory.limit_bytes
    share = cache.gpu_memory_utilization
    return int(memory.limit_bytes * (DEFAULT_SHARE[memory.device_type] if share is None else share))


def _is_cpu_default(cache: CacheConfig, memory: DeviceMemory) -> bool:
    """On CPU memory is shared with others, so without a word from the user no more is taken than can be needed."""
    return memory.device_type == "cpu" and cache.gpu_memory_utilization is None and cache.kv_cache_memory_bytes is None
