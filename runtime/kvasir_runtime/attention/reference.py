"""Paged attention in plain torch, one request after the other: the twin that the fast backends are tested against.

It computes in float32, or in float64 where the inputs are, and reads the cache through the block table like the others.
"""

from torch import Tensor

from kvasir_runtime.attention.backend import AttentionMetadata
from kvasir_runtime.kernels.paged_attention import paged_attention_reference
from kvasir_runtime.kernels.write_kv import write_kv_reference


class ReferenceAttention:
    """Runs on any device and float type."""

    name = "reference"

    def write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        write_kv_reference(key, value, key_cache, value_cache, metadata.slots)

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> Tensor:
        return paged_attention_reference(
            *(query, key_cache, value_cache, metadata.query_starts, metadata.seq_lens, metadata.block_table),
            *(scale, window, softcap, out),
        )
