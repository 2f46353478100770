"""A decoder's layers as an encoder: tokens see those behind them too, as EmbeddingGemma was trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvasir_runtime.attention.backend import AttentionStep, HeadNorms, LayerCache
from kvasir_runtime.encoders.attention import Texts
from kvasir_runtime.kernels.rowwise import rms_norm_reference, rotary_reference
from kvasir_runtime.models.decoder import Decoder


@dataclass(slots=True)
class BidirectionalStep:
    """Attention of one step, layer after layer: what one writes it attends to next, and nothing is kept."""

    texts: Texts
    _written: tuple[Tensor, Tensor] | None = None

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        if norms is not None:
            query = rms_norm_reference(query, norms.query_weight, norms.eps)
            key = rms_norm_reference(key, norms.key_weight, norms.eps)
        rotary_reference(query, key, cos, sin, self.texts.positions)
        self._written = key, value
        return query

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Half of the window is before a token, half behind it."""
        assert self._written is not None, "a layer writes before it attends"
        assert softcap is None, "no family of encoders has a soft-cap"
        return self.texts.attend(query, *self._written, scale, None if window is None else window // 2)


@dataclass(frozen=True, slots=True)
class BidirectionalDecoder:
    decoder: Decoder
    dtype: torch.dtype

    @torch.inference_mode()
    def __call__(self, texts: Texts) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last norm."""
        step = cast(AttentionStep, BidirectionalStep(texts))  # but for the inputs of paged attention
        return self.decoder(texts.token_ids, step, self._no_caches(), None).hidden

    def _no_caches(self) -> Sequence[LayerCache]:
        """As many as the layers would have."""
        nothing = torch.empty(0)
        return [LayerCache(nothing, nothing, 0)] * len(self.decoder.kv_specs(self.dtype))
