"""What distinguishes one decoder-only architecture from another, as plain data. The decoder reads nothing else."""

from dataclasses import dataclass
from typing import Literal

from kvasir_runtime.models.rope import RopeOptions

QueryKeyNorm = Literal["per_head", "full_width"]
"""Over each head's numbers (Qwen3, Gemma 3), or over all heads at once (OLMo 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """Checkpoint names of a layer's norms; None where the architecture has none at that place."""

    before_attention: str | None
    after_attention: str | None
    """Applied to the attention's output before it joins the residual stream."""
    before_mlp: str | None
    after_mlp: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    window: int | None
    """Keys that a token sees, itself included; None: all before it."""
    rope: RopeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerOptions, ...]
    norms: LayerNorms
    norm_eps: float
    norm_weight_offset: float
    """Added to every norm weight: 1 where checkpoints hold w of (1 + w) (Gemma)."""
    activation: Literal["silu", "gelu_tanh"]
    attention_scale: float
    """Factor of query-key products."""
    attention_softcap: float | None
    """c of c * tanh(product / c)."""
    logit_softcap: float | None
    embedding_scale: float | None
    """Factor of the input embeddings."""
    query_key_norm: QueryKeyNorm | None
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    packed_projections: bool
    """The checkpoint holds qkv_proj and gate_up_proj instead of their parts (Phi-3)."""
    tie_word_embeddings: bool

    @property
    def num_layers(self) -> int:
        return len(self.layers)
