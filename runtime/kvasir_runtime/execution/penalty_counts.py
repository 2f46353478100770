"""How often each token occurs in the sequences that are penalised for repeating themselves, kept on the device.

Repetition counts prompt and output, presence and frequency only the output, as Hugging Face and OpenAI define them.
"""

import numpy as np
import torch
from torch import Tensor


class PenaltyCounts:
    """One line a row; only those of penalised rows are kept up. A CPU's memory is taken on use, CUDA's at once."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._counts: tuple[Tensor, Tensor] | None = None
        if device.type == "cuda":
            self._counts = self._allocate()

    @property
    def in_output(self) -> Tensor:
        """int32 [num_rows, vocab_size], occurrences."""
        return self._allocated()[0]

    @property
    def in_prompt(self) -> Tensor:
        """bool [num_rows, vocab_size], whether the token occurs."""
        return self._allocated()[1]

    def begin(self, row: int, token_ids: Tensor, num_prompt_tokens: int) -> None:
        """Count a sequence's tokens [n] anew."""
        in_output, in_prompt = self._allocated()
        prompt, output = token_ids[:num_prompt_tokens].long(), token_ids[num_prompt_tokens:].long()
        in_prompt[row].zero_().index_fill_(0, prompt, True)
        in_output[row].zero_().scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """All rows at once: every source is read before any target is written."""
        in_output, in_prompt = self._allocated()
        in_output[targets] = in_output[sources]
        in_prompt[targets] = in_prompt[sources]

    def add(self, rows: Tensor, token_ids: Tensor, holds: Tensor) -> None:
        """Count output tokens [n] of rows [n] where they hold, bool [n]."""
        self.in_output.index_put_((rows, token_ids), holds.int(), accumulate=True)

    def _allocated(self) -> tuple[Tensor, Tensor]:
        if self._counts is None:
            self._counts = self._allocate()
        return self._counts

    def _allocate(self) -> tuple[Tensor, Tensor]:
        if self._device.type == "cpu":  # numpy's zeros are pages that take no memory until they are written to
            return torch.from_numpy(np.zeros(self._shape, np.int32)), torch.from_numpy(np.zeros(self._shape, np.bool_))
        return (
            torch.zeros(self._shape, dtype=torch.int32, device=self._device),
            torch.zeros(self._shape, dtype=torch.bool, device=self._device),
        )
