"""Changes to logits before anything is drawn: what is not a number, a grammar's mask, penalties for repeated tokens,
logit_bias, and min_tokens. A position after drafts is adjusted as if they had been sampled already."""

import torch
from torch import Tensor

from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.step_inputs import SampledPositions, Subset
from kvasir_runtime.kernels.sample import Penalize

_NEVER, _LARGEST = float("-inf"), torch.finfo(torch.float32).max


def adjust_logits(
    logits: Tensor,
    rows: Rows,
    positions: SampledPositions,
    after: Tensor,
    mask: Tensor | None,
    max_seq_len: int | None = None,
    penalize: Penalize | None = None,
) -> Tensor:
    """The adjusted logits, new and float32 [num_positions, vocab_size]; `after` and the others as of `sampler.draw`.
    `penalize` does what `_penalize` does, its twin of torch operators.

    NaN is never drawn, and infinity is the largest number.
    """
    adjusted = logits.float().nan_to_num(nan=_NEVER, posinf=_LARGEST, neginf=_NEVER)
    if mask is not None:
        adjusted.masked_fill_(~_is_allowed(mask, adjusted.shape[1]), _NEVER)
    if positions.penalised is not None and penalize is not None:
        most = max_seq_len or rows.token_ids.shape[1]
        penalize(adjusted, positions.tensors(after, mask), rows.sampling_tensors(), most)
    elif positions.penalised is not None:
        _penalize(adjusted, rows, positions, positions.penalised, after, max_seq_len)
    if positions.biased is not None:
        _add_bias(adjusted, rows, positions.biased)
    if positions.min_tokens is not None:
        _forbid_stop_tokens(adjusted, rows, positions.min_tokens, after)
    return adjusted


def _is_allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """Bool [num_positions, vocab_size] of packed bits."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def _penalize(
    logits: Tensor, rows: Rows, positions: SampledPositions, penalised: Subset, after: Tensor, max_seq_len: int | None
) -> None:
    """Repetition scales what prompt or output hold, once; presence and frequency are subtracted for the output's, as
    Hugging Face and OpenAI define them."""
    sampling, own = rows.sampling, penalised.rows
    some, num_earlier = penalised.of(logits), penalised.of(positions.num_earlier)
    token_ids = rows.token_ids[:, :max_seq_len][own].long()
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    is_known = column < (penalised.of(after) + 1 - num_earlier).unsqueeze(1)
    is_output = is_known & (column >= rows.num_prompt_tokens[own].unsqueeze(1))
    counts = torch.zeros(some.shape, dtype=torch.int32, device=some.device)
    is_in_prompt = torch.zeros_like(counts).scatter_add_(1, token_ids, (is_known & ~is_output).int()) > 0
    counts.scatter_add_(1, token_ids, is_output.int())
    if positions.width > 1:
        _count_drafts(counts, rows.drafts[own, : positions.width - 1], num_earlier)
    is_in_output = counts > 0
    penalty = sampling.repetition_penalty[own].unsqueeze(1)
    scaled = torch.where(some > 0, some / penalty, some * penalty)
    some = torch.where(is_in_output | is_in_prompt, scaled, some)
    some -= is_in_output * sampling.presence_penalty[own].unsqueeze(1)
    some -= counts * sampling.frequency_penalty[own].unsqueeze(1)
    logits[penalised.index] = some.clamp_(max=_LARGEST)


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
