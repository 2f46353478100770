"""One decoder layer: norms, attention over the paged KV cache, MLP. It works on flat tokens `[num_tokens, ...]`.

The residual stream travels apart from the sublayers' outputs (`delta`), so that adding and normalising are one kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, LayerCache
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kv_cache.spec import KvSpec


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


class Attention(Protocol):
    """Any kind of attention. Its output projection is apart, since only some tokens may go on to it."""

    @property
    def output(self) -> Callable[[Tensor], Tensor]: ...

    def kv_specs(self, dtype: torch.dtype) -> tuple[KvSpec, ...]:
        """What this rank keeps of each token in a KV cache of type `dtype`; nothing where another layer's is read."""

    def __call__(self, hidden: Tensor, step: AttentionStep, caches: Sequence[LayerCache], /) -> Tensor:
        """The input of `output`, of all tokens; what is kept of them is stored. The caches are those of all layers of
        the rank, spec by spec: a layer knows which it has to do with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A norm that is None is not there in the architecture."""

    attention: Attention
    mlp: Callable[[Tensor], Tensor]
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None

    def __call__(
        self,
        delta: Tensor,
        residual: Tensor | None,
        step: AttentionStep,
        caches: Sequence[LayerCache],
        kept_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(delta, residual) after the layer. With `kept_tokens` int64 [num_kept], only those go on after attention."""
        normed, residual = enter(self.before_attention, delta, residual)
        attended = self.attention(normed, step, caches)
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


def residual_stream(delta: Tensor, residual: Tensor | None) -> Tensor:
    """A copy of the stream with `delta` joined; later layers change the stream itself in place."""
    return delta.clone() if residual is None else residual + delta


def _leave(norm: Norm | None, delta: Tensor) -> Tensor:
    return delta if norm is None else norm(delta)
