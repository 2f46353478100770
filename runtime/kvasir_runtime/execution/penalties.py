"""Keeps up the counts of tokens that penalised sequences hold; `logit_adjustments` reads them."""

import numpy as np
import torch

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.scheduling.step import BoolArray, Fork, Int32Array, NewSequence, StepPlan


class Penalties(StepFeature):
    name = "penalties"

    def __init__(self, rows: Rows, transfers: Transfers) -> None:
        self._rows = rows
        self._counts = rows.penalty_counts
        self._transfers = transfers

    def on_rows(self, plan: StepPlan) -> None:
        """Rows that were added, then forks, then what was written."""
        for new in plan.added:
            self._begin(new)
        if plan.forks:
            self._fork(plan.forks)
        if len(plan.token_writes):
            self._count_written(plan.token_writes)

    def wanted_by(self, rows: Int32Array) -> BoolArray:
        return self._rows.sampling.having(Trait.PENALTIES, rows)

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """Tokens that hold count for what follows."""
        own = step.positions.having(self.name, self.wanted_by, sequences=True)
        if drawn is None or own is None:
            return None
        token_ids = own.of(drawn.verified.token_ids).long()
        column = torch.arange(token_ids.shape[1], device=token_ids.device)
        holds = column < own.of(drawn.verified.num_accepted).unsqueeze(1)
        self._counts.add(own.rows.unsqueeze(1).expand_as(token_ids), token_ids, holds)
        return None

    def _begin(self, new: NewSequence) -> None:
        if self._rows.sampling.traits[new.row] & Trait.PENALTIES:
            known = self._rows.token_ids[new.row, : len(new.token_ids)]
            self._counts.begin(new.row, known, new.spec.num_prompt_tokens)

    def _fork(self, forks: tuple[Fork, ...]) -> None:
        """All rows at once."""
        targets = np.array([fork.target_row for fork in forks], dtype=np.int32)
        if self.wanted_by(targets).any():
            sources = np.array([fork.source_row for fork in forks], dtype=np.int64)
            self._counts.copy(*self._transfers.upload(sources, targets.astype(np.int64)))

    def _count_written(self, writes: Int32Array) -> None:
        own = np.flatnonzero(self.wanted_by(writes[:, 0]))
        if len(own):
            (columns,) = self._transfers.upload(np.ascontiguousarray(writes[own].T))
            row, position, token_id = columns.long()
            self._counts.add(row, token_id, position >= self._rows.num_prompt_tokens[row])
