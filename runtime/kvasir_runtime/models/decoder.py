"""The decoder: embeddings, layers, last norm and language-model head, over tokens of many requests laid end to end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, LayerCache, StepInputs
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.layers import DecoderLayer, Norm, enter, residual_stream
from kvasir_runtime.models.options import DecoderOptions
from kvasir_runtime.models.vocabulary import Embedding


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
