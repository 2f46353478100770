"""Candidates of beam searches: the most likely tokens after each beam, instead of one that is drawn."""

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.scheduling.step import CANDIDATES, BoolArray, Int32Array, StepPlan


class BeamCandidates(StepFeature):
    """Beams' logits become log-probabilities before anything else, so what adjustments change is summed up as Hugging
    Face sums it."""

    name = CANDIDATES

    def __init__(self, rows: Rows) -> None:
        self._numbers = np.zeros(len(rows.prompt_lens), dtype=np.int64)
        """By row; 0 draws."""

    def on_rows(self, plan: StepPlan) -> None:
        for new in plan.added:
            self._numbers[new.row] = new.num_candidates
        self._numbers[[fork.target_row for fork in plan.forks]] = self._numbers[[f.source_row for f in plan.forks]]

    def wanted_by(self, rows: Int32Array) -> BoolArray:
        return self._numbers[rows] > 0

    def adjust(self, logits: Tensor, positions: SampledPositions) -> Tensor:
        own = positions.having(self.name, self.wanted_by)
        if own is None:
            return logits
        changed = logits.float().nan_to_num(nan=float("-inf"), posinf=torch.finfo(torch.float32).max)
        changed[own.index] = own.of(changed).log_softmax(dim=-1)
        return changed

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        """A line for each beam, which has one position."""
        own = step.positions.having(self.name, self.wanted_by)
        if drawn is None or own is None:
            return None
        numbers = self._numbers[own.host_rows]
        adjusted = own.of(drawn.adjusted())
        likely = adjusted.topk(min(int(numbers.max()), adjusted.shape[1]), dim=-1)
        return {"rows": own.host_rows, "numbers": numbers, "token_ids": likely.indices, "logprobs": likely.values}
