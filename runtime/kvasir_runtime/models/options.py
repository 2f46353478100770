"""What distinguishes one decoder-only architecture from another, as plain data. The decoder reads nothing else.

A kind of attention or of MLP is an options class here, a module that computes it, and its line in `layer_loader`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvasir_runtime.kv_cache.spec import FULL, KvSpec, Reach
from kvasir_runtime.models.rope import RopeOptions

QueryKeyNorm = Literal["per_head", "full_width"]
"""Over each head's numbers (Qwen3, Gemma 3), or over all heads at once (OLMo 2)."""

NormPlace = Literal["before_attention", "after_attention", "before_mlp", "after_mlp"]
"""After: applied to a sublayer's output before it joins the residual stream."""

PRE_NORMS: frozenset[NormPlace] = frozenset(("before_attention", "before_mlp"))
POST_NORMS: frozenset[NormPlace] = frozenset(("after_attention", "after_mlp"))
SANDWICH_NORMS = PRE_NORMS | POST_NORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryOptions:
    """Multi-head attention whose query heads share key and value heads (Ainslie et al. 2023)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of query-key products."""
    softcap: float | None
    """c of c * tanh(product / c)."""
    window: int | None
    """Keys that a token sees, itself included; None: all before it."""
    rope: RopeOptions
    query_key_norm: QueryKeyNorm | None
    qkv_bias: bool
    output_bias: bool
    kv_copies: int = 1
    """Tensor ranks that keep these KV heads."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_specs(self, dtype: torch.dtype) -> tuple[KvSpec, ...]:
        """What the layer keeps of each token in a KV cache of type `dtype`."""
        spec = KvSpec(
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            reach=FULL if self.window is None else Reach.window(self.window),
            num_copies=self.kv_copies,
        )
        return (spec,)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpOptions:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    intermediate_size: int
    activation: Literal["silu", "gelu_tanh"]
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeOptions:
    """A mixture of experts: each token goes to the `top_k` likeliest of them (Shazeer et al. 2017)."""

    num_experts: int
    top_k: int
    """At most num_experts."""
    renormalises: bool
    """Whether the weights of a token's experts add up to one; else they are their shares among all experts."""
    expert: GatedMlpOptions
    """Of each; without bias."""
    shared: GatedMlpOptions | None
    """An expert that every token goes to besides, weighted by a sigmoid of its own (Qwen2-MoE)."""


AttentionOptions = GroupedQueryOptions
"""The union of all kinds."""
MlpOptions = GatedMlpOptions | MoeOptions
"""The union of all kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    attention: AttentionOptions
    mlp: MlpOptions
    norms: frozenset[NormPlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerOptions, ...]
    norm_eps: float
    norm_weight_offset: float
    """Added to every norm weight: 1 where checkpoints hold w of (1 + w) (Gemma)."""
    logit_softcap: float | None
    embedding_scale: float | None
    """Factor of the input embeddings."""
    tie_word_embeddings: bool
    quantization: Mapping[str, Any] | None
    """The checkpoint's `quantization_config` as it stands; None: plain floats."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_exact_length(self) -> int:
        """Longest sequence whose rotations are those of training: scalings that follow its length end earlier."""
        limits = [layer.attention.rope.max_exact_length for layer in self.layers]
        return min([self.max_position_embeddings, *(limit for limit in limits if limit is not None)])

    @property
    def max_length(self) -> int:
        """Longest sequence that may be asked for: a rope's scaling may reach beyond max_position_embeddings."""
        exact = self.max_exact_length
        if exact < self.max_position_embeddings:
            return exact
        return min(layer.attention.rope.max_length for layer in self.layers)
