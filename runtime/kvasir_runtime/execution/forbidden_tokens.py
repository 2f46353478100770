"""Tokens that a request never draws: all but `allowed_token_ids`, and what would complete one of its `bad_words`.

What a word needs to be complete is told by its row's own tokens and drafts, on the device: nothing waits for the host,
and a sequence that comes back after preemption, or from another engine, is where its tokens have brought it.
"""

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_features import ForwardedStep, StepFeature, TokenMask
from kvasir_runtime.execution.step_inputs import SampledPositions, Subset
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.step import StepPlan
from kvasir_runtime.structured.vocabulary import ALL_ALLOWED, mask_of, num_words

_NEVER = float("-inf")
_ANY, _NONE = -1, -2
"""In the place of a token: before a word's first one, where any may stand, and before the output's first."""


def taken_rows(plan: StepPlan) -> dict[int, SamplingParams]:
    """Those that change hands, with how their sequences are sampled."""
    return {new.row: new.spec.sampling for new in plan.added} | {fork.target_row: fork.sampling for fork in plan.forks}


class AllowedTokens(StepFeature):
    name = "allowed_tokens"
    asked_by = attrgetter("sampling.allowed_token_ids")

    def __init__(self, rows: Rows) -> None:
        self._vocab_size = rows.sampling.vocab_size
        self.wants = np.zeros(len(rows.prompt_lens), dtype=np.bool_)
        self._words: dict[int, NDArray[np.int32]] = {}
        """By row, its line of a mask."""

    def on_rows(self, plan: StepPlan) -> None:
        for row, sampling in taken_rows(plan).items():
            self.wants[row] = sampling.allowed_token_ids is not None
            self._words.pop(row, None)
            if sampling.allowed_token_ids is not None:
                self._words[row] = mask_of(sampling.allowed_token_ids, self._vocab_size)

    def mask(self, step: ForwardedStep) -> TokenMask | None:
        own = step.positions.having(self.name, self.wants)
        if own is None:
            return None
        masks = np.full((step.positions.num_positions, num_words(self._vocab_size)), ALL_ALLOWED)
        masks[own.host_index] = [self._words[row] for row in own.host_rows.tolist()]
        return masks


@dataclass(frozen=True, slots=True)
class ListedWords:
    """All words of some positions, one below the other."""

    own: Subset
    lines: Tensor  # int64 [n], indices into the positions
    beginnings: Tensor  # int64 [n, most tokens - 1], `_ANY` before the first
    lasts: Tensor  # int64 [n]


class BadWords(StepFeature):
    """A word's last token is forbidden where the output ends in all that comes before it, drafts included."""

    name = "bad_words"
    asked_by = attrgetter("sampling.bad_words")

    def __init__(self, rows: Rows, transfers: Transfers) -> None:
        self._rows = rows
        self._transfers = transfers
        self.wants = np.zeros(len(rows.prompt_lens), dtype=np.bool_)
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._positions: Tensor | None = None
        """Of the step's tokens."""
        self._listed: ListedWords | None = None
        """Those of the last step, which may have been for the same positions."""

    def on_rows(self, plan: StepPlan) -> None:
        for row, sampling in taken_rows(plan).items():
            self._words[row] = sampling.bad_words
            self.wants[row] = bool(sampling.bad_words)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        self._positions = inputs.positions
        return None

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        own = positions.having(self.name, self.wants)
        if own is None or self._positions is None:
            return logits
        if self._listed is None or self._listed.own is not own:
            self._listed = self._list(own)
        listed, num_tokens = self._listed, logits.shape[1]
        ends = self._ends(own, positions, self._positions[positions.tokens[own.index]], listed.beginnings.shape[1])
        completes = ((ends[listed.lines] == listed.beginnings) | (listed.beginnings == _ANY)).all(dim=1)
        forbidden = torch.zeros((len(own.index), num_tokens + 1), dtype=torch.bool, device=logits.device)
        columns = torch.where(completes, listed.lasts, num_tokens)  # the last of them none reads
        # Not `[...] = True`, which may wait for the device (see `Rows._add`).
        forbidden.index_put_((listed.lines, columns), torch.ones_like(completes))
        changed = logits.clone()
        changed[own.index] = own.of(logits).masked_fill(forbidden[:, :num_tokens], _NEVER)
        return changed

    def _list(self, own: Subset) -> ListedWords:
        words = [(line, word) for line, row in enumerate(own.host_rows.tolist()) for word in self._words[row]]
        most = max(len(word) for _, word in words)
        padded = np.full((len(words), most), _ANY, dtype=np.int64)
        for number, (_, word) in enumerate(words):
            padded[number, most - len(word) :] = word
        lines = np.array([line for line, _ in words], dtype=np.int64)
        lines_there, there = self._transfers.upload(lines, padded)
        return ListedWords(own, lines_there, there[:, :-1], there[:, -1])

    def _ends(self, own: Subset, positions: SampledPositions, after: Tensor, width: int) -> Tensor:
        """The last tokens of the outputs, int64 [positions, width]; `after` are those that a token is drawn after."""
        rows = self._rows
        column = after.unsqueeze(1) - torch.arange(width - 1, -1, -1, device=after.device)
        last_known = (after - positions.num_earlier[own.index]).unsqueeze(1)
        row = own.rows.unsqueeze(1)
        tokens = rows.token_ids[row, column.clamp(min=0)].long()
        if rows.drafts.shape[1]:
            drafts = rows.drafts[row, (column - last_known - 1).clamp(0, rows.drafts.shape[1] - 1)].long()
            tokens = torch.where(column > last_known, drafts, tokens)
        return tokens.masked_fill(column < rows.num_prompt_tokens[own.rows].unsqueeze(1), _NONE)
