"""The attention backend of GPUs: our Triton kernels. Under TRITON_INTERPRET=1 they also run, slowly, on CPU tensors."""

from torch import Tensor

from kvasir_runtime.attention.backend import AttentionMetadata
from kvasir_runtime.kernels.paged_attention_triton import triton_paged_attention
from kvasir_runtime.kernels.write_kv_triton import triton_write_kv


class TritonAttention:
    """Holds no state; one object serves all layers."""

    name = "triton"

    def write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        triton_write_kv(key, value, key_cache, value_cache, metadata.slots)

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        out: Tensor,
    ) -> Tensor:
        return triton_paged_attention(
            query, key_cache, value_cache, metadata.query_starts, metadata.seq_lens, metadata.block_table,
            scale, window, softcap, out, max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len,
        )  # fmt: skip
