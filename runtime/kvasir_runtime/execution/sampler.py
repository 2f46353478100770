"""Draws a token after each wanted position of a step: greedy, or by the sequence's parameters.

Order: logit adjustments, temperature, min_p, top_k, top_p, draw. Positions do not influence each other, and a draw is
keyed by (seed, position), so equal logits give equal tokens in any batch, with drafts and without (where logits are
equal: docs/decisions/0042-a-rows-numbers-are-its-own.md). A CPU does it in one kernel (kernels/sample.py), of which the
passes over all logits here are the twin; CUDA in a few launches (kernels/sample_triton.py), after what adjusts logits.
"""

from torch import Tensor

from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.rows import Rows, Trait
from kvasir_runtime.execution.step_inputs import SampledPositions, Subset
from kvasir_runtime.kernels.draw import least_likely_kept_reference, look_up_reference, uniform_reference
from kvasir_runtime.kernels.step_ops import StepOps


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
        if positions.traits & Trait.ADJUSTMENTS and not ops.adjusts_logits:
            logits, mask = adjust_logits(logits, rows, positions, after, mask, max_seq_len, ops.penalize), None
        return ops.sample(logits, positions.tensors(after, mask), rows.sampling_tensors())
    adjusted = adjust_logits(logits, rows, positions, after, mask, max_seq_len, ops.penalize)
    random = positions.random
    if random is None:
        return ops.argmax(adjusted)
    if random.is_all:
        return _draw_random(adjusted, rows, positions, random, after)
    token_ids = ops.argmax(adjusted)
    token_ids[random.index] = _draw_random(random.of(adjusted), rows, positions, random, random.of(after))
    return token_ids


def _draw_random(logits: Tensor, rows: Rows, positions: SampledPositions, random: Subset, after: Tensor) -> Tensor:
    """One token id for each of the random positions from their logits, which are overwritten."""
    sampling, own = rows.sampling, random.rows
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # NaN where all are -inf, which draws token 0 in the end
    scaled = logits.mul_(sampling.inverse_temperature[own].unsqueeze(1))
    top_k = sampling.top_k[own] if positions.traits & Trait.TOP_K else None
    top_p = sampling.top_p[own] if positions.traits & Trait.TOP_P else None
    cut = least_likely_kept_reference(scaled, sampling.log_min_p[own], top_k, top_p)
    return look_up_reference(scaled, cut, uniform_reference(sampling.seeds[own], after + 1))
