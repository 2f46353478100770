"""Changes to logits before anything is drawn: what is not a number, a grammar's mask, penalties for repeated tokens,
logit_bias, and min_tokens. A position after drafts is adjusted as if they had been sampled already."""

import torch
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions, Subset

_NEVER = float("-inf")


def adjust_logits(
    logits: Tensor, rows: Rows, positions: SampledPositions, after: Tensor, mask: Tensor | None
) -> Tensor:
    """Adjust float32 logits [num_positions, vocab_size], in place.

    `after` int64 [num_positions] are the positions before the tokens about to be drawn, `mask` bool as the logits says
    which are allowed. NaN is never drawn, and infinity is the largest number.
    """
    logits.nan_to_num_(nan=_NEVER, posinf=torch.finfo(logits.dtype).max, neginf=_NEVER)
    if mask is not None:
        logits.masked_fill_(~mask, _NEVER)
    if positions.penalised is not None:
        _penalize(logits, rows, positions, positions.penalised)
    if positions.biased is not None:
        _add_bias(logits, rows, positions.biased)
    if positions.min_tokens is not None:
        _forbid_stop_tokens(logits, rows, positions.min_tokens, after)
    return logits


def _penalize(logits: Tensor, rows: Rows, positions: SampledPositions, penalised: Subset) -> None:
    """Repetition scales what prompt or output hold, once; presence and frequency are subtracted for the output's."""
    sampling, own = rows.sampling, penalised.rows
    counts = rows.penalty_counts.in_output[own]
    if positions.width > 1:
        _count_drafts(counts, rows.drafts[own, : positions.width - 1], penalised.of(positions.num_earlier))
    some = penalised.of(logits)
    is_in_output = counts > 0
    penalty = sampling.repetition_penalty[own].unsqueeze(1)
    scaled = torch.where(some > 0, some / penalty, some * penalty)
    some = torch.where(is_in_output | rows.penalty_counts.in_prompt[own], scaled, some)
    some -= is_in_output * sampling.presence_penalty[own].unsqueeze(1)
    some -= counts * sampling.frequency_penalty[own].unsqueeze(1)
    logits[penalised.index] = some


def _count_drafts(counts: Tensor, drafts: Tensor, num_earlier: Tensor) -> None:
    """Add to counts [n, vocab_size] the first `num_earlier` [n] of each one's drafts [n, most]."""
    column = torch.arange(drafts.shape[1], device=drafts.device)
    is_earlier = (column < num_earlier.unsqueeze(1)) & (drafts >= 0)
    counts.scatter_add_(1, drafts.clamp(min=0).long(), is_earlier.int())


def _add_bias(logits: Tensor, rows: Rows, biased: Subset) -> None:
    """Padding repeats a token: it gets the same number twice."""
    place = (biased.index.unsqueeze(1), rows.sampling.bias_token_ids[biased.rows])
    logits[place] = logits[place] + rows.sampling.bias_values[biased.rows]


def _forbid_stop_tokens(logits: Tensor, rows: Rows, limited: Subset, after: Tensor) -> None:
    own = limited.rows
    num_output = limited.of(after) + 1 - rows.num_prompt_tokens[own]
    is_early = (num_output < rows.sampling.min_tokens[own]).unsqueeze(1)
    place = (limited.index.unsqueeze(1), rows.sampling.stop_token_ids[own])
    logits[place] = torch.where(is_early, _NEVER, logits[place])
