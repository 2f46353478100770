"""One decoder layer: norms, attention over the paged KV cache, gated MLP. It works on flat tokens `[num_tokens, ...]`.

The residual stream travels apart from the sublayers' outputs (`delta`), so that adding and normalising are one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionBackend, AttentionMetadata
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers share in one step."""

    positions: Tensor  # int64 [num_tokens]
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class Norm:
    """Root-mean-square norm with its weight, alone or joined with the addition to the residual stream."""

    ops: Ops
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum); the sum takes the residual's place."""
        return self.ops.add_rms_norm(delta, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    ops: Ops
    backend: AttentionBackend
    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    cos: Tensor  # float32 [num_positions, rotary_dim]
    sin: Tensor
    query_norm: Norm | None
    key_norm: Norm | None
    full_width_norm: bool
    """Whether query_norm and key_norm see all heads at once."""

    def __call__(self, hidden: Tensor, context: StepContext, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """Attention of all heads, before the output projection: [num_tokens, num_heads * head_dim]."""
        query, key, value = self._project(hidden)
        self.ops.rotary(query, key, self.cos, self.sin, context.positions)
        self.backend.write(key, value, key_cache, value_cache, context.metadata)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self.backend.attend(
            query,
            key_cache,
            value_cache,
            context.metadata,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            out=out,
        )
        return out.view(out.shape[0], -1)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [num_tokens, heads, head_dim]; views of one buffer where nothing is normalised."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        query, key, value = torch.split_with_sizes(self.qkv(hidden), [query_size, kv_size, kv_size], -1)
        if self.full_width_norm and self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        num_tokens = hidden.shape[0]
        query = query.view(num_tokens, self.num_heads, self.head_dim)
        key = key.view(num_tokens, self.num_kv_heads, self.head_dim)
        if not self.full_width_norm and self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value.view(num_tokens, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Linear
    down: Linear
    activate_and_mul: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activate_and_mul(self.gate_up(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A norm that is None is not there in the architecture."""

    attention: Attention
    mlp: GatedMlp
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None

    def __call__(
        self,
        delta: Tensor,
        residual: Tensor | None,
        context: StepContext,
        key_cache: Tensor,
        value_cache: Tensor,
        kept_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(delta, residual) after the layer. With `kept_tokens` int64 [num_kept], only those go on after attention."""
        normed, residual = enter(self.before_attention, delta, residual)
        attended = self.attention(normed, context, key_cache, value_cache)
        if kept_tokens is not None:
            attended, residual = attended[kept_tokens], residual[kept_tokens]
        delta = _leave(self.after_attention, self.attention.output(attended))
        normed, residual = enter(self.before_mlp, delta, residual)
        return _leave(self.after_mlp, self.mlp(normed)), residual


def enter(norm: Norm | None, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(input of the next sublayer, residual stream) once `delta` has joined the stream."""
    if norm is None:
        joined = delta if residual is None else residual + delta
        return joined, joined
    if residual is None:
        return norm(delta), delta
    return norm.add(delta, residual)


def _leave(norm: Norm | None, delta: Tensor) -> Tensor:
    return delta if norm is None else norm(delta)
