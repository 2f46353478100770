"""The decoder: embeddings, layers, last norm and language-model head, over tokens of many requests laid end to end.

The residual stream travels apart from the sublayers' outputs (`delta`), so that adding and normalising are one kernel.
The vocabulary is shared out among tensor ranks: each embeds its own tokens, and computes their logits. The last rank
has fewer tokens where they do not share out evenly, or none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvasir_runtime.attention.backend import AttentionStep, LayerCache, StepInputs
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kernels.ops import Ops
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.checkpoint import Shard
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    tensor: Collectives
    vocab_size: int

    @property
    def shard(self) -> Shard:
        return Shard(0, self.tensor.rank, self.tensor.size, may_be_uneven=True)

    @property
    def token_ids(self) -> range:
        """This rank's."""
        return self.shard.part(self.vocab_size)

    def embed(self, token_ids: Tensor, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows [n, hidden_size] of token ids int64 [n]; `rows_of` finds this rank's, counted from its first."""
        own = token_ids - self.token_ids.start
        is_other = (own < 0) | (own >= len(self.token_ids))
        rows = rows_of(own.masked_fill(is_other, 0))
        return self.tensor.all_reduce(rows.masked_fill_(is_other.unsqueeze(-1), 0))

    def join(self, logits: Tensor) -> Tensor:
        """Logits [n, vocab_size] on every rank, from each one's own."""
        most = -(-self.vocab_size // self.tensor.size)
        padded = logits if logits.shape[-1] == most else functional.pad(logits, (0, most - logits.shape[-1]))
        return self.tensor.all_gather(padded, dim=-1)[..., : self.vocab_size]


@dataclass(frozen=True, slots=True)
class VocabularyParallelHead:
    """Logits of the whole vocabulary on every rank."""

    linear: Linear
    part: VocabularyPart

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.part.join(self.linear(hidden))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table of its own, or of the head's weight where the two are tied."""

    table: Tensor | Linear
    scale: float | None
    part: VocabularyPart | None = None
    """None: the table holds the whole vocabulary."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self._rows(token_ids) if self.part is None else self.part.embed(token_ids, self._rows)
        return rows if self.scale is None else rows * self.scale

    def _rows(self, token_ids: Tensor) -> Tensor:
        return self.table[token_ids] if isinstance(self.table, Tensor) else self.table.rows(token_ids)


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


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What travels from one layer to the next, and from one pipeline stage to the next."""

    delta: Tensor  # [num_tokens, hidden_size], the last sublayer's output, which has yet to join the residual stream
    residual: Tensor | None  # [num_tokens, hidden_size]; None: `delta` begins it
    captured: tuple[Tensor, ...] = ()  # each [num_tokens, hidden_size], of those of `captured_layers` that lie behind


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    hidden: Tensor  # [num_kept, hidden_size], after the last norm
    captured: tuple[Tensor, ...]  # each [num_tokens, hidden_size], in the order of `captured_layers`


class ComputeStep(Protocol):
    """Layers over a step's inputs, kernel by kernel or on a graph."""

    def __call__(self, inputs: StepInputs, kept_tokens: Tensor | None, *, captures: bool = True) -> DecoderOutput:
        """Hidden states of the tokens named (None: of all). Without `captures` nobody reads those of inner layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """All layers, or a pipeline stage's run of them. The first stage has the embedding, the last norm and head, and
    where the two are tied both of them have the table."""

    options: DecoderOptions
    """Of the whole model, of which a rank may have a part."""
    embedding: Embedding | None
    first_layer: int = 0
    layers: tuple[DecoderLayer, ...]
    norm: Norm | None
    head: Callable[[Tensor], Tensor] | None

    def __call__(
        self,
        token_ids: Tensor,  # int64 [num_tokens]
        attention: AttentionStep,
        caches: Sequence[LayerCache],
        kept_tokens: Tensor | None,
        captured_layers: tuple[int, ...] = (),
        entering: HiddenStates | None = None,
    ) -> DecoderOutput:
        """Hidden states of the tokens whose logits are wanted, `kept_tokens` int64 [num_kept]; None keeps all.

        `caches` holds one entry for each of `kv_specs`; the step's keys and values are stored in them. For each of
        `captured_layers` the residual stream that enters this layer is copied out, of all tokens.
        """
        assert self.norm is not None, "hidden states leave the last stage only"
        left = self.states(token_ids, attention, caches, kept_tokens, captured_layers, entering)
        return DecoderOutput(hidden=enter(self.norm, left.delta, left.residual)[0], captured=left.captured)

    def states(
        self,
        token_ids: Tensor,
        attention: AttentionStep,
        caches: Sequence[LayerCache],
        kept_tokens: Tensor | None,
        captured_layers: tuple[int, ...] = (),
        entering: HiddenStates | None = None,
    ) -> HiddenStates:
        """What leaves the last of these layers; `entering` what the stage before handed over, None on the first."""
        if entering is None:
            assert self.embedding is not None, "all stages but the first are given hidden states"
            entering = HiddenStates(self.embedding(token_ids), None)
        delta, residual = entering.delta, entering.residual
        before = (layer for layer in captured_layers if layer < self.first_layer)
        captured = dict(zip(before, entering.captured, strict=True))
        last = self.first_layer + len(self.layers) - 1
        for index, layer in enumerate(self.layers, start=self.first_layer):
            if index in captured_layers:
                captured[index] = residual_stream(delta, residual)
            # Past the last attention only the kept tokens matter: a prefill saves most of that layer.
            kept = kept_tokens if index == last else None
            delta, residual = layer(delta, residual, attention, caches, kept)
        return HiddenStates(delta, residual, tuple(captured[layer] for layer in captured_layers if layer in captured))

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_kept, vocab_size] in the model's type."""
        assert self.head is not None, "only the last stage has the head"
        logits = self.head(hidden)
        cap = self.options.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def kv_specs(self, dtype: torch.dtype) -> tuple[KvSpec, ...]:
        """What its layers keep of a token in a KV cache of type `dtype`, layer by layer."""
        return tuple(spec for layer in self.layers for spec in layer.attention.kv_specs(dtype))
