"""Draws a token after each wanted position of a step: greedy, or by the sequence's parameters.

Order: logit adjustments, temperature, min_p, top_k, top_p, draw. Positions do not influence each other, and a draw is
keyed by (seed, position), so a sequence's tokens do not depend on its batch or on drafts. One code for all devices;
on CUDA nothing in it waits for the device.
"""

from torch import Tensor

from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.rows import Rows
from kvasir_runtime.execution.sampled_positions import SampledPositions, Subset
from kvasir_runtime.execution.sampling_rows import Trait
from kvasir_runtime.kernels.step_ops import StepOps


def adjusted_logits(
    logits: Tensor, rows: Rows, positions: SampledPositions, after: Tensor, mask: Tensor | None
) -> Tensor:
    """The logits that tokens are drawn from; the same ones where nothing changes which is the most likely."""
    needs_none = not positions.traits & (Trait.RANDOM | Trait.ADJUSTMENTS)
    if needs_none and mask is None:
        return logits
    return adjust_logits(logits.float(), rows, positions, after, mask)


def draw(logits: Tensor, rows: Rows, positions: SampledPositions, after: Tensor, ops: StepOps) -> Tensor:
    """Token ids int64 [num_positions] from adjusted logits, which may be overwritten, after the positions `after`.

    Where no token is possible (all logits are NaN or forbidden), token 0 is drawn.
    """
    random = positions.random
    if random is None:
        return ops.argmax(logits)
    if random.is_all:
        return _draw_random(logits, rows, positions, random, after, ops)
    token_ids = ops.argmax(logits)
    token_ids[random.index] = _draw_random(random.of(logits), rows, positions, random, random.of(after), ops)
    return token_ids


def _draw_random(
    logits: Tensor, rows: Rows, positions: SampledPositions, random: Subset, after: Tensor, ops: StepOps
) -> Tensor:
    """One token id for each of the random positions from their logits, which are overwritten."""
    sampling = rows.sampling
    logits.div_(sampling.temperature[random.rows].unsqueeze(1))
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # NaN where all are -inf, which draws token 0 in the end
    if positions.min_p is not None:
        some = positions.min_p.of(logits)
        cut = sampling.min_p[positions.min_p.rows].log().unsqueeze(1)
        logits[positions.min_p.index] = some.masked_fill(some < cut, float("-inf"))
    weights = logits.exp_()
    if positions.truncated is not None:
        own = positions.truncated
        some = own.of(weights)
        top_k = sampling.top_k[own.rows] if positions.traits & Trait.TOP_K else None
        top_p = sampling.top_p[own.rows] if positions.traits & Trait.TOP_P else None
        some = some.masked_fill_(some < ops.least_likely_kept(some, top_k, top_p), 0.0)
        if not own.is_all:
            weights[own.index] = some
    return ops.look_up(weights, ops.uniform(sampling.seeds[random.rows], after + 1))
