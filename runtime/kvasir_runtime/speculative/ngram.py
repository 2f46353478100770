"""Prompt lookup: what followed the last few tokens when they stood in the sequence before (Saxena 2023).

Nothing is kept between steps, since one vectorised look over a row is cheap: 7 us at 2,048 known tokens and 18 us at
32,768, the quickest of 300 (one busy Xeon core; medians 16 and 44 us).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep

TokenIds = NDArray[np.int32]


class NgramProposer:
    name = "ngram"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        """On CUDA the rows are copied to the host, which waits for the device."""
        drafts = np.full((len(step.rows), step.num_proposals), -1, dtype=np.int32)
        if len(drafts):
            rows = known_tokens(step)
            for own, token_ids in zip(drafts, rows, strict=True):
                found = find_continuation(token_ids, self._min_tokens, self._max_tokens)
                if found is not None:
                    own[:] = continuation(token_ids, found, len(own))
        return torch.from_numpy(drafts).to(step.token_ids.device)


def known_tokens(step: VerifiedStep) -> list[TokenIds]:
    """The known tokens of the sequences that sampled, on the host: views of the rows where they lie there."""
    num_known = step.num_known.tolist()
    if step.token_ids.device.type == "cpu":
        token_ids = step.token_ids.numpy()
        return [token_ids[row, :length] for row, length in zip(step.rows.tolist(), num_known, strict=True)]
    token_ids = step.token_ids[step.rows, : max(num_known)].cpu().numpy()
    return [row[:length] for row, length in zip(token_ids, num_known, strict=True)]


def continuation(token_ids: TokenIds, found: int, number: int) -> TokenIds:
    """So many tokens from `found` on; behind the last known one the text goes on as it just did."""
    drafts: TokenIds = token_ids[found + np.arange(number) % (len(token_ids) - found)]
    return drafts


def find_continuation(token_ids: TokenIds, min_tokens: int, max_tokens: int) -> int | None:
    """Where the text went on after the longest earlier occurrence of its last min_tokens to max_tokens tokens, of
    equally long ones the most recent; None: there is none."""
    num_known = len(token_ids)
    if num_known <= min_tokens:
        return None
    # Ends of matches, exclusive; the match at the very end has no continuation.
    ends = np.flatnonzero(token_ids[min_tokens - 1 : -1] == token_ids[-1]) + min_tokens
    for length in range(2, min_tokens + 1):
        ends = ends[token_ids[ends - length] == token_ids[-length]]
    if not len(ends):
        return None
    for length in range(min_tokens + 1, min(max_tokens, num_known - 1) + 1):
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[-length]]
        if not len(longer):
            break
        ends = longer
    return int(ends[-1])
