"""An encoder: embeddings, layers and last norm over whole texts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.encoders.attention import Texts
from kvasir_runtime.encoders.options import Activation
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.rowwise import rotary_reference


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor  # [hidden_size]
    bias: Tensor | None  # [hidden_size]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def unchanged(x: Tensor) -> Tensor:
    return x


Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    words: Tensor  # [vocab_size, hidden_size]
    positions: Tensor | None  # [num_positions, hidden_size]
    first_position: int
    types: Tensor | None  # [num_types, hidden_size]
    norm: Norm

    def __call__(self, texts: Texts) -> Tensor:
        hidden = self.words[texts.token_ids]
        if self.types is not None:
            hidden = hidden + self.types[texts.types.clamp(max=len(self.types) - 1)]
        if self.positions is not None:
            hidden = hidden + self.positions[texts.positions + self.first_position]
        return self.norm(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    qkv: Linear
    output: Linear
    num_heads: int
    half_window: int | None
    rope: tuple[Tensor, Tensor] | None
    """Cosines and sines, float32 [num_positions, head_dim]."""

    def __call__(self, hidden: Tensor, texts: Texts) -> Tensor:
        query, key, value = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1).unbind(1)
        if self.rope is not None:
            rotary_reference(query, key, *self.rope, texts.positions)
        attended = texts.attend(query, key, value, query.shape[-1] ** -0.5, self.half_window)
        return self.output(attended.flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    up: Linear
    down: Linear
    activation: Activation
    is_gated: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        inner = self.up(hidden)
        if self.is_gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLayer:
    attention: SelfAttention
    attention_norm: Norm
    mlp: Mlp
    mlp_norm: Norm
    norms_first: bool

    def __call__(self, hidden: Tensor, texts: Texts) -> Tensor:
        if self.norms_first:
            hidden = hidden + self.attention(self.attention_norm(hidden), texts)
            return hidden + self.mlp(self.mlp_norm(hidden))
        hidden = self.attention_norm(self.attention(hidden, texts) + hidden)
        return self.mlp_norm(self.mlp(hidden) + hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    embeddings: Embeddings
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm

    @torch.inference_mode()
    def __call__(self, texts: Texts) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last norm."""
        hidden = self.embeddings(texts)
        for layer in self.layers:
            hidden = layer(hidden, texts)
        return self.final_norm(hidden)
