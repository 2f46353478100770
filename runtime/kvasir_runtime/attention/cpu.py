"""The attention backend of CPUs: the compiled paged-attention kernel, or its torch twin where there is no compiler."""

import torch

from kvasir_runtime.attention.backend import AttentionMetadata
from kvasir_runtime.kernels.native import load_library
from kvasir_runtime.kernels.paged_attention import cpu_paged_attention, paged_attention_reference
from kvasir_runtime.kernels.write_kv import cpu_write_kv, write_kv_reference


class CpuAttention:
    """Paged attention on the CPU. Holds no state of requests; one object serves all layers."""

    name = "cpu"

    def __init__(self) -> None:
        library = load_library()
        self._attention = cpu_paged_attention(library) if library else paged_attention_reference
        self._write_kv = cpu_write_kv(library) if library else write_kv_reference

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_dim] of the step in their slots."""
        self._write_kv(key, value, key_cache, value_cache, metadata.slots)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Fill and return out [num_tokens, num_heads, head_dim]."""
        return self._attention(
            *(query, key_cache, value_cache, metadata.query_starts, metadata.seq_lens, metadata.block_table),
            *(scale, window, softcap, out),
        )
