"""Log-probabilities of prompt tokens: which tokens of a step score one that is asked for, and their scores."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.execution.logprobs import LogprobTensors, concatenate, token_logprobs
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.scheduling.step import StepPlan

_POSITIONS_AT_ONCE = 128
"""Positions scored together: a whole prompt's logits over a large vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Tokens of one chunk whose logits score the prompt token after each."""

    row: int
    tokens: NDArray[np.int64]  # [n], the step's
    first_scored: int
    """Position of the first token that is scored; the others follow it."""


def scored_prompts(plan: StepPlan, rows: Rows, query_lens: NDArray[np.int32]) -> list[ScoredPrompt]:
    """The chunks of a step that hold prompt tokens to be scored. A chunk starts where it was planned to."""
    if not rows.sampling.traits_of(plan.rows) & Trait.PROMPT_LOGPROBS:
        return []
    ends = np.cumsum(query_lens, dtype=np.int64)
    scored = []
    for request in np.flatnonzero(rows.sampling.traits[plan.rows] & Trait.PROMPT_LOGPROBS).tolist():
        row, first, length = int(plan.rows[request]), int(plan.starts[request]), int(query_lens[request])
        number = min(first + length, int(rows.prompt_lens[row]) - 1) - first
        if request >= plan.num_decodes and number > 0:
            scored.append(ScoredPrompt(row, int(ends[request]) - length + np.arange(number), first + 1))
    return scored


def score_prompt(
    prompt: ScoredPrompt, hidden: Tensor, rows: Rows, to_logits: Callable[[Tensor], Tensor]
) -> LogprobTensors:
    """Scores of the prompt's tokens from the hidden states [n, hidden_size] before them."""
    number = int(rows.sampling.num_prompt_logprobs[prompt.row])
    scored_ids = rows.token_ids[prompt.row, prompt.first_scored : prompt.first_scored + len(hidden)].long()
    parts = []
    for start in range(0, len(hidden), _POSITIONS_AT_ONCE):
        some = slice(start, start + _POSITIONS_AT_ONCE)
        parts.append(token_logprobs(to_logits(hidden[some]), scored_ids[some], number))
    return concatenate(parts)
