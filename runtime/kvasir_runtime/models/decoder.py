"""The decoder: embeddings, layers, last norm and language-model head, over tokens of many requests laid end to end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, LayerCache
from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.models.layers import DecoderLayer, Norm, enter, residual_stream
from kvasir_runtime.models.options import DecoderOptions


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table of its own, or of the head's weight where the two are tied."""

    table: Tensor | Linear
    scale: float | None

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.table.rows(token_ids) if isinstance(self.table, Linear) else self.table[token_ids]
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    hidden: Tensor  # [num_kept, hidden_size], after the last norm
    captured: tuple[Tensor, ...]  # each [num_tokens, hidden_size], in the order of `captured_layers`


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    options: DecoderOptions
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear

    def __call__(
        self,
        token_ids: Tensor,  # int64 [num_tokens]
        attention: AttentionStep,
        caches: Sequence[LayerCache],
        kept_tokens: Tensor | None,
        captured_layers: tuple[int, ...] = (),
    ) -> DecoderOutput:
        """Hidden states of the tokens whose logits are wanted, `kept_tokens` int64 [num_kept]; None keeps all.

        `caches` holds one entry a layer; the step's keys and values are stored in them. For each of `captured_layers`
        the residual stream that enters this layer is copied out, of all tokens.
        """
        delta, residual = self.embedding(token_ids), None
        captured: dict[int, Tensor] = {}
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if index in captured_layers:
                captured[index] = residual_stream(delta, residual)
            # Past the last attention only the kept tokens matter: a prefill saves most of that layer.
            kept = kept_tokens if index == last else None
            delta, residual = layer(delta, residual, attention, cache, kept)
        return DecoderOutput(
            hidden=enter(self.norm, delta, residual)[0], captured=tuple(captured[index] for index in captured_layers)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_kept, vocab_size] in the model's type."""
        logits = self.head(hidden)
        cap = self.options.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def kv_specs(options: DecoderOptions, dtype: torch.dtype) -> tuple[KvSpec, ...]:
    """What each layer keeps of a token in a KV cache of type `dtype`."""
    return tuple(layer.attention.kv_spec(dtype) for layer in options.layers)
