"""Draws a token after each wanted position of a step: greedy, or by the sequence's parameters.

Order: `adjust_logits` (what is not a number, a grammar's mask, penalties for repeated tokens, logit_bias, min_tokens),
temperature, min_p, top_k, top_p, draw. A position after drafts is adjusted as if they had been sampled already, else
positions do not influence each other. A draw is keyed by (seed, position), so equal logits give equal tokens in any
batch, with drafts and without (where logits are equal: docs/decisions/0042-a-rows-numbers-are-its-own.md). A CPU does
it in one kernel (kernels/sample.py), of which the passes over all logits here are the twin; on CUDA nothing waits for
the device.
"""

import torch
from torch import Tensor

from kvasir_runtime.execution.rows import Rows, Trait
from kvasir_runtime.execution.step_inputs import SampledPositions, Subset
from kvasir_runtime.kernels.sample import PositionTensors, SamplingTensors
from kvasir_runtime.kernels.step_ops import StepOps

_NEVER, _LARGEST = float("-inf"), torch.finfo(torch.float32).max


def takes_most_likely(positions: SampledPositions, mask: Tensor | None) -> bool:
    """Whether all of the step's tokens are the most likely by the logits as they are."""
    return mask is None and not positions.traits & (Trait.RANDOM | Trait.ADJUSTMENTS)


def draw(
    logits: Tensor,
    rows: Rows,
    positions: SampledPositions,
    after: Tensor,
    ops: StepOps,
    *,
    mask: Tensor | None = None,
    max_seq_len: int | None = None,
) -> Tensor:
    """Token ids int64 [num_positions] for logits [num_positions, vocab_size], which are left as they are.


    `after` int64 [num_positions] are the positions before the tokens, below `max_seq_len` if one is given; `mask` is
    that of `PositionTensors`. Where no token is possible (all logits are NaN or forbidden), token 0 is drawn.
    """
    if takes_most_likely(positions, mask):
        return ops.argmax(logits)
    if ops.sample is not None:
        of_positions = PositionTensors(positions.rows_of, after, positions.num_earlier, mask)
        return ops.sample(logits, of_positions, _sampling_tensors(rows))
    adjusted = adjust_logits(logits, rows, positions, after, mask, max_seq_len)
    random = positions.random
    if random is None:
        return ops.argmax(adjusted)
    if random.is_all:
        return _draw_random(adjusted, rows, positions, random, after, ops)
    token_ids = ops.argmax(adjusted)
    token_ids[random.index] = _draw_random(random.of(adjusted), rows, positions, random, random.of(after), ops)
    return token_ids


def _draw_random(
    logits: Tensor, rows: Rows, positions: SampledPositions, random: Subset, after: Tensor, ops: StepOps
) -> Tensor:
    """One token id for each of the random positions from their logits, which are overwritten."""
    sampling, own = rows.sampling, random.rows
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # NaN where all are -inf, which draws token 0 in the end
    scaled = logits.mul_(sampling.inverse_temperature[own].unsqueeze(1))
    top_k = sampling.top_k[own] if positions.traits & Trait.TOP_K else None
    top_p = sampling.top_p[own] if positions.traits & Trait.TOP_P else None
    cut = ops.least_likely_kept(scaled, sampling.log_min_p[own], top_k, top_p)
    return ops.look_up(scaled, cut, ops.uniform(sampling.seeds[own], after + 1))


def adjust_logits(
    logits: Tensor,
    rows: Rows,
    positions: SampledPositions,
    after: Tensor,
    mask: Tensor | None,
    max_seq_len: int | None = None,
) -> Tensor:
    """The adjusted logits, new and float32 [num_positions, vocab_size]; `after` and the others as of `draw`.

    NaN is never drawn, and infinity is the largest number.
    """
    adjusted = logits.float().nan_to_num(nan=_NEVER, posinf=_LARGEST, neginf=_NEVER)
    if mask is not None:
        adjusted.masked_fill_(~_is_allowed(mask, adjusted.shape[1]), _NEVER)
    if positions.penalised is not None:
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


def _sampling_tensors(rows: Rows) -> SamplingTensors:
    sampling = rows.sampling
    return SamplingTensors(
        inverse_temperature=sampling.inverse_temperature,
        top_p=sampling.top_p,
        log_min_p=sampling.log_min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        top_k=sampling.top_k,
        min_tokens=sampling.min_tokens,
        seeds=sampling.seeds,
        num_stop_ids=torch.from_numpy(sampling.num_stop_ids),
        stop_ids=sampling.stop_token_ids,
        num_biases=torch.from_numpy(sampling.num_biases),
        bias_ids=sampling.bias_token_ids,
        biases=sampling.bias_values,
        token_ids=rows.token_ids,
        num_prompt_tokens=rows.num_prompt_tokens,
        drafts=rows.drafts,
    )
