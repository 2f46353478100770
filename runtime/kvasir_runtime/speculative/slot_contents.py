"""Which token each slot of a draft's KV was computed for, so that a proposer sees what it lacks of a sequence.

Steps without drafts, preemption, forks and blocks from the prefix cache all leave a row with entries that are another
sequence's, or none. An entry is taken for the row's own if it was made for the same token at the same position.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import GroupInputs, LayerCache

NOTHING = -1
_SHIFT = 32


class SlotContents:
    def __init__(self, cache: LayerCache) -> None:
        num_blocks, self.block_size = cache.key.shape[:2]
        # One more, which takes what is written nowhere (slot -1).
        self._held = torch.full((num_blocks * self.block_size + 1,), NOTHING, device=cache.key.device)

    def note(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """An entry of each token int64 [num_tokens] at its position was stored in its slot."""
        self._held[slots] = _key(positions, token_ids)

    def forget(self, slots: Tensor) -> None:
        """What the slots int64 [n] hold is nobody's."""
        self._held.index_fill_(0, slots, NOTHING)

    def copy_blocks(self, copies: NDArray[np.int32]) -> None:
        """One after the other: source and target block [m, 2]."""
        by_block = self._held[:-1].view(-1, self.block_size)
        for source, target in copies.tolist():
            by_block[target] = by_block[source]

    def held(self, group: GroupInputs, rows: Tensor, positions: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(whether the rows' entries are those of the tokens, whether there are any at all), both [n, m]; rows int64
        [n], positions and token ids [n, m]."""
        held = self._held[slots_of(group, rows, positions, self.block_size)]
        return held == _key(positions, token_ids), held != NOTHING


def slots_of(group: GroupInputs, rows: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots [n, m] of positions [n, m], which the rows int64 [n] have blocks for."""
    return group.block_table[rows].gather(1, positions // block_size).long() * block_size + positions % block_size


def _key(positions: Tensor, token_ids: Tensor) -> Tensor:
    return positions << _SHIFT | token_ids
