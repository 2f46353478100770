"""Makes one vector of each prompt that wants one: the mean of some of its tokens' hidden states, and what follows it.

Sums are kept in float64 from chunk to chunk, so it makes no difference how a prompt is cut.
"""

from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.execution.transfers import Transfers
from kvasir_runtime.pooling.description import PoolingDescription
from kvasir_runtime.pooling.head import Head
from kvasir_runtime.scheduling.step import POOLED, StepPlan


class Pooler(StepFeature):
    name = POOLED
    asked_by = attrgetter("pooling")

    def __init__(
        self, rows: Rows, transfers: Transfers, pooling: PoolingDescription, head: Head, hidden_size: int
    ) -> None:
        num_rows = len(rows.prompt_lens)
        self._rows = rows
        self._transfers = transfers
        self._pooling = pooling
        self._head = head
        self.wants = np.zeros(num_rows, dtype=np.bool_)
        self._sums = torch.zeros((num_rows, hidden_size), dtype=torch.float64, device=transfers.device)
        self._summed_rows = np.empty(0, dtype=np.int64)
        """Of each token that the step under way adds."""
        self._complete_rows = np.empty(0, dtype=np.int64)
        """Whose prompts it computes to their ends."""

    def on_rows(self, plan: StepPlan) -> None:
        rows = [new.row for new in plan.added]
        if rows:
            self.wants[rows] = [new.spec.pooling is not None for new in plan.added]
            self._sums.index_fill_(0, self._transfers.upload(np.array(rows, dtype=np.int64))[0], 0.0)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Tokens of the step's chunks that are among those pooled. A chunk starts where it was planned to."""
        query_lens = inputs.lengths.query_lens
        firsts = np.cumsum(query_lens, dtype=np.int64) - query_lens
        tokens, summed_rows, complete_rows = [], [], []
        for request in np.flatnonzero(self.wants[plan.rows]).tolist():
            row, start, length = int(plan.rows[request]), int(plan.starts[request]), int(query_lens[request])
            num_tokens = int(self._rows.prompt_lens[row])
            pooled = self._pooling.positions(num_tokens)
            first, end = max(pooled.start, start), min(pooled.stop, start + length)
            if first < end:
                tokens.append(firsts[request] + np.arange(first - start, end - start))
                summed_rows.append(np.full(end - first, row))
            if start + length == num_tokens:
                complete_rows.append(row)
        self._summed_rows = np.concatenate(summed_rows) if summed_rows else np.empty(0, dtype=np.int64)
        self._complete_rows = np.array(complete_rows, dtype=np.int64)
        return np.concatenate(tokens) if tokens else None

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        rows, complete = self._transfers.upload(self._summed_rows, self._complete_rows)
        if len(self._summed_rows):
            self._sums.index_add_(0, rows, step.hidden[self.name].double())
        if not len(self._complete_rows):
            return None
        prompt_lens = self._rows.prompt_lens[self._complete_rows].tolist()
        numbers = np.array([len(self._pooling.positions(number)) for number in prompt_lens], dtype=np.float64)
        (counts,) = self._transfers.upload(numbers)
        means = (self._sums[complete] / counts.unsqueeze(1)).float()
        return {"rows": self._complete_rows, "vectors": self._head(means)}
