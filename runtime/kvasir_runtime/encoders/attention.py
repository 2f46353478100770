"""Attention over whole texts laid end to end, where a token sees those behind it too. Nothing is kept of a text.

Each text is computed by itself, so its numbers do not depend on the others of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Texts:
    """Of a step, on the device."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], each text's from 0
    types: Tensor  # int64 [num_tokens], 1 of the second of two texts
    lengths: Sequence[int]
    """Of each text."""
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, half_window: int | None) -> Tensor:
        """[num_tokens, num_heads, head_dim] of a query so shaped, and keys and values of as many heads or a part of
        them; a token sees so many tokens on either side, or all."""
        lengths = list(self.lengths)
        queries, keys, values = (torch.split_with_sizes(each, lengths) for each in (query, key, value))
        parts = zip(queries, keys, values, strict=True)
        return torch.cat([self._attend_one(*part, scale, half_window) for part in parts])

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor, scale: float, half_window: int | None) -> Tensor:
        mask = None if half_window is None else self._mask(len(query), half_window)
        attended = functional.scaled_dot_product_attention(
            _by_head(query),
            _by_head(key),
            _by_head(value),
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.squeeze(0).transpose(0, 1)

    def _mask(self, length: int, half_window: int) -> Tensor | None:
        """Bool [length, length]; None where all is seen."""
        if length <= half_window + 1:
            return None
        if (length, half_window) not in self._masks:
            places = torch.arange(length, device=self.token_ids.device)
            distance = (places.unsqueeze(0) - places.unsqueeze(1)).abs_()
            self._masks[length, half_window] = distance <= half_window
        return self._masks[length, half_window]


def _by_head(of_tokens: Tensor) -> Tensor:
    """[1, num_heads, num_tokens, head_dim]"""
    return of_tokens.transpose(0, 1).unsqueeze(0)
