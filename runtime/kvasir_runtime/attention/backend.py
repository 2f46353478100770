"""The one attention call that every backend answers, for batches that mix prefill chunks and decodes.

Query token i of a request sits at position `seq_len - query_len + i` and sees the keys at or before it. Keys and values
of the step are written before attention reads them, so requests of one step may share blocks that it fills.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step live. Tokens of a request are adjacent; requests follow each other."""

    query_starts: Tensor  # int32 [num_requests + 1], first token of each request, then the number of tokens
    seq_lens: Tensor  # int32 [num_requests], tokens in the KV cache including this step's
    block_table: Tensor  # int32 [num_requests, max_blocks]
    slots: Tensor  # int64 [num_tokens], block_id * block_size + offset; -1: not written
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Caches are views `[num_blocks, block_size, num_kv_heads, head_dim]` into the one buffer; kernels take strides."""

    name: str

    def write(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Store key and value `[num_tokens, num_kv_heads, head_dim]` of the step in their slots."""

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
        out: Tensor,  # [num_tokens, num_heads, head_dim]
    ) -> Tensor:
        """Causal attention; `window` counts the keys seen including the token itself, `softcap` bounds the logits."""
