"""Draws the next token of each row from its logits: greedy, or by the request's parameters.

Order: logit adjustments (penalties, bias, min_tokens), temperature, min_p, top_k, top_p, draw. Rows do not influence
each other, and the draw is keyed by (seed, position), so a request's tokens do not depend on its batch.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.execution.device import upload
from kvasir_runtime.execution.input_batch import Int64Array, RequestRows
from kvasir_runtime.execution.logit_adjustments import adjust_logits
from kvasir_runtime.execution.philox import uniform
from kvasir_runtime.execution.sampling_rows import Trait

_NUM_CANDIDATES = 128
"""Most likely tokens sorted to find where top_p cuts; rows that need more are sorted whole."""
_CHUNK = 128
"""Tokens summed up at once when a draw is looked up in the distribution."""

_SLOW = Trait.RANDOM | Trait.PENALTIES | Trait.LOGIT_BIAS | Trait.MIN_TOKENS


def sample(
    logits: Tensor,
    requests: RequestRows,
    rows: Int64Array,
    positions: Int64Array,
    most_likely: Callable[[Tensor], Tensor],
) -> Tensor:
    """Token ids int64 [num_rows] for `positions` of `rows`. May overwrite the logits [num_rows, vocab_size].

    `most_likely` gives each row's first most likely token: greedy steps do nothing else.
    """
    sampling = requests.sampling
    if not sampling.traits_of(rows) & _SLOW:
        return most_likely(logits)
    logits = adjust_logits(logits.float(), requests, rows, positions)
    random = sampling.having(Trait.RANDOM, rows)
    if len(random) == len(rows):
        return _draw(logits, requests, rows, positions)
    token_ids = most_likely(logits)
    if len(random):
        chosen = upload(random, logits.device)
        token_ids[chosen] = _draw(logits[chosen], requests, rows[random], positions[random])
    return token_ids


def _draw(logits: Tensor, requests: RequestRows, rows: Int64Array, positions: Int64Array) -> Tensor:
    """One token id a row from float32 logits, which are overwritten."""
    sampling, device = requests.sampling, logits.device
    logits.div_(upload(sampling.temperature[rows], device).unsqueeze(1))
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    min_p = sampling.min_p[rows]
    if min_p.any():
        logits.masked_fill_(logits < upload(min_p, device).log_().unsqueeze(1), float("-inf"))
    top_k, top_p = sampling.top_k[rows], sampling.top_p[rows]
    limited = np.flatnonzero((top_k < logits.shape[1]) | (top_p < 1.0))
    if len(limited):
        index = upload(limited, device)
        some = logits[index]
        most_k = int(top_k[limited].max(where=top_k[limited] < logits.shape[1], initial=0))
        cut = _least_likely_kept(some, upload(top_k[limited], device), upload(top_p[limited], device), most_k)
        logits[index] = some.masked_fill_(some < cut, float("-inf"))
    return _look_up(logits.exp_(), upload(uniform(sampling.seed[rows], positions), device))


def _least_likely_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, most_k: int) -> Tensor:
    """Logit [num_rows, 1] below which top_k, then top_p of what it leaves, cut; equally likely tokens stay together.

    `logits` have a maximum of 0, `most_k` is the largest top_k below the vocabulary's size (0: none). top_p keeps the
    fewest tokens whose probabilities add up to it.
    """
    vocab_size = logits.shape[1]
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES, most_k))
    values = logits.topk(num_candidates, dim=-1).values
    has_top_k = (top_k < vocab_size).unsqueeze(1)
    kth = values.gather(1, top_k.clamp(max=num_candidates).unsqueeze(1) - 1)
    kth = torch.where(has_top_k, kth, float("-inf"))
    weights = torch.where(values >= kth, values, float("-inf")).exp_()
    total = torch.where(has_top_k, weights.sum(dim=-1, keepdim=True), logits.exp().sum(dim=-1, keepdim=True))
    wanted = total * top_p.unsqueeze(1)
    before = weights.cumsum(dim=-1) - weights
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    cut = torch.maximum(kth, values.gather(1, num_kept - 1))
    cut = torch.where(top_p.unsqueeze(1) < 1.0, cut, kth)
    unfinished = ((num_kept == num_candidates) & ~has_top_k & (top_p.unsqueeze(1) < 1.0)).squeeze(1)
    if num_candidates < vocab_size and unfinished.any():
        cut[unfinished] = _nucleus_of_all(logits[unfinished], wanted[unfinished])
    return cut


def _nucleus_of_all(logits: Tensor, wanted: Tensor) -> Tensor:
    """Where top_p cuts rows whose distributions are too flat for the candidates to tell."""
    values = logits.sort(dim=-1, descending=True).values
    weights = values.exp()
    before = weights.cumsum(dim=-1) - weights
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    return values.gather(1, num_kept - 1)


def _look_up(weights: Tensor, draws: Tensor) -> Tensor:
    """Index of the token whose share of `weights` [num_rows, vocab_size] holds the draw in [0, 1), in two levels."""
    num_rows, vocab_size = weights.shape
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab_size % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    sums = chunks.sum(dim=-1).double()
    upto = sums.cumsum(dim=-1)
    target = (draws * upto[:, -1]).unsqueeze(1)
    chunk = torch.searchsorted(upto, target, right=True).clamp_(max=upto.shape[1] - 1)
    inside = target - (upto.gather(1, chunk) - sums.gather(1, chunk))
    row = torch.arange(num_rows, device=weights.device)
    inner = chunks[row, chunk.squeeze(1)].double().cumsum(dim=-1)
    # The chunk's sum was rounded: a draw at its very end must still meet a token with a weight.
    inside = torch.minimum(
        inside, torch.nextafter(inner[:, -1:], torch.zeros((), dtype=inner.dtype, device=inner.device))
    )
    return (chunk * _CHUNK + torch.searchsorted(inner, inside, right=True)).squeeze(1)
