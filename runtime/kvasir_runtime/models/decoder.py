"""The decoder: embeddings, layers, last norm and language-model head, over tokens of many requests laid end to end."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvasir_runtime.kernels.linear import Linear
from kvasir_runtime.models.layers import DecoderLayer, Norm, StepContext, enter
from kvasir_runtime.models.options import DecoderOptions


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table of its own, or of the head's weight where the two are tied."""

    table: Tensor | Linear
    scale: float | None

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.table.rows(token_ids) if isinstance(self.table, Linear) else self.table[token_ids]
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    options: DecoderOptions
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear

    def __call__(
        self, token_ids: Tensor, context: StepContext, kv_cache: list[tuple[Tensor, Tensor]], kept_tokens: Tensor | None
    ) -> Tensor:
        """Hidden states [num_kept, hidden_size] of the tokens whose logits are wanted; None keeps all.

        `kv_cache` holds each layer's key and value cache; the step's keys and values are stored in them.
        """
        delta, residual = self.embedding(token_ids), None
        last = len(self.layers) - 1
        for index, (layer, (key_cache, value_cache)) in enumerate(zip(self.layers, kv_cache, strict=True)):
            # Past the last attention only the kept tokens matter: a prefill saves most of that layer.
            kept = kept_tokens if index == last else None
            delta, residual = layer(delta, residual, context, key_cache, value_cache, kept)
        return enter(self.norm, delta, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_kept, vocab_size] in the model's type."""
        logits = self.head(hidden)
        cap = self.options.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
