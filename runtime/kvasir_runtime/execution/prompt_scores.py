"""Log-probabilities of prompt tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.attention.backend import StepInputs
from kvasir_runtime.execution.logprobs import token_logprobs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.execution.step_features import DrawnStep, ForwardedStep, StepFeature, TensorColumns
from kvasir_runtime.scheduling.step import PROMPT_LOGPROBS, BoolArray, Int32Array, StepPlan

_POSITIONS_AT_ONCE = 128
"""Positions scored together: a whole prompt's logits over a large vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one chunk whose logits score the prompt token after each."""

    row: int
    tokens: NDArray[np.int64]  # [n], the step's
    first_scored: int
    """Position of the first token that is scored; the others follow it."""


class PromptScores(StepFeature):
    name = PROMPT_LOGPROBS

    def __init__(self, rows: Rows, to_logits: Callable[[Tensor], Tensor]) -> None:
        self._rows = rows
        self._to_logits = to_logits
        self._prompts: list[ScoredPrompt] = []

    def wanted_by(self, rows: Int32Array) -> BoolArray:
        return self._rows.sampling.having(Trait.PROMPT_LOGPROBS, rows)

    def before_decoder(self, plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64] | None:
        """Those of the chunks that hold prompt tokens to be scored. A chunk starts where it was planned to."""
        query_lens = inputs.lengths.query_lens
        ends = np.cumsum(query_lens, dtype=np.int64)
        self._prompts = []
        for request in np.flatnonzero(self.wanted_by(plan.rows)).tolist():
            row, first, length = int(plan.rows[request]), int(plan.starts[request]), int(query_lens[request])
            number = min(first + length, int(self._rows.prompt_lens[row]) - 1) - first
            if request >= plan.num_decodes and number > 0:
                tokens = int(ends[request]) - length + np.arange(number)
                self._prompts.append(ScoredPrompt(row, tokens, first + 1))
        return np.concatenate([prompt.tokens for prompt in self._prompts]) if self._prompts else None

    def collect(self, step: ForwardedStep, drawn: DrawnStep | None) -> TensorColumns | None:
        if not self._prompts:
            return None
        rows = np.repeat([prompt.row for prompt in self._prompts], [len(prompt.tokens) for prompt in self._prompts])
        numbers = self._rows.sampling.num_prompt_logprobs[rows]
        scored_ids = torch.cat([self._scored_ids(prompt) for prompt in self._prompts])
        hidden = step.hidden[self.name]
        parts = [
            token_logprobs(self._to_logits(hidden[some]), scored_ids[some], int(numbers.max()))
            for some in (slice(n, n + _POSITIONS_AT_ONCE) for n in range(0, len(hidden), _POSITIONS_AT_ONCE))
        ]
        return {"rows": rows, "numbers": numbers, **{name: torch.cat([p[name] for p in parts]) for name in parts[0]}}

    def _scored_ids(self, prompt: ScoredPrompt) -> Tensor:
        first = prompt.first_scored
        return self._rows.token_ids[prompt.row, first : first + len(prompt.tokens)].long()
