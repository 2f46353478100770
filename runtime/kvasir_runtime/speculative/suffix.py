"""Suffix lookup: what most often followed the longest match of the sequence's end, in itself or in the recent history
of the rank (Oliaro et al. 2024, "SuffixDecoding: extreme speculative decoding for emerging AI applications").

Sequences find the texts of their own domain only: those with the same salt, or without one.

Drafts go on for as long as they are likely, so their number follows the confidence. Where the paper keeps a suffix
tree a request and one for all, one bounded history with hash chains answers both. A lookup
takes 9 to 25 us (quartile and median over source code, one busy Xeon core).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir_runtime.kv_cache.spec import KvSpec
from kvasir_runtime.speculative.ngram import TokenIds, known_tokens
from kvasir_runtime.speculative.proposer import ProposerSetup, VerifiedStep
from kvasir_runtime.speculative.token_history import TokenHistory

HISTORY_TOKENS = 1 << 17
"""About 30 MB."""
MAX_MATCHES = 16
"""Earlier places that are looked at, the newest."""
MAX_MATCH_LENGTH = 16
LEAST_CONFIDENCE = 0.3
"""Drafts end where their chance to hold, judged by what followed before, falls below it."""
_CHECKED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Tail:
    """How far the history has followed a row."""

    num_known: int
    place: int
    domain: int


class SuffixProposer:
    name = "suffix"
    wants_hidden = False
    captured_layers: tuple[int, ...] = ()
    kv_specs: Sequence[KvSpec] = ()

    def __init__(self, history_tokens: int = HISTORY_TOKENS) -> None:
        self._history = TokenHistory(history_tokens)
        self._most_added = history_tokens // 4
        self._tails: dict[int, _Tail] = {}  # by row

    def bind(self, setup: ProposerSetup) -> None:
        """Nothing of it is needed."""

    def propose(self, step: VerifiedStep) -> Tensor:
        """On CUDA the rows are copied to the host, which waits for the device."""
        drafts = np.full((len(step.rows), step.num_proposals), -1, dtype=np.int32)
        if len(drafts):
            sequences = zip(drafts, step.rows.tolist(), known_tokens(step), step.batch.extra_keys, strict=True)
            for own, row, token_ids, extra_keys in sequences:
                place = self._follow(row, token_ids, _domain(extra_keys))
                found = likely_continuation(self._history, place, step.num_proposals)
                own[: len(found)] = found
        return torch.from_numpy(drafts).to(step.token_ids.device)

    def _follow(self, row: int, token_ids: TokenIds, domain: int) -> int:
        """Add what is new of a row to the history; the place of its last token."""
        num_known, tail = len(token_ids), self._tails.get(row)
        place: int | None = None
        start = max(0, num_known - self._most_added)
        if tail is not None and tail.domain == domain and self._continues(tail, token_ids):
            place, start = tail.place, max(start, tail.num_known)
        for token in token_ids[start:].tolist():
            place = self._history.add(token, place, domain)
        assert place is not None, "a row knows at least one token"
        self._tails[row] = _Tail(num_known, place, domain)
        return place

    def _continues(self, tail: _Tail, token_ids: TokenIds) -> bool:
        """Whether the row still holds the sequence that was followed: rows change hands untold."""
        if not tail.num_known <= len(token_ids):
            return False
        history, place = self._history, tail.place
        last: list[int] = token_ids[max(0, tail.num_known - _CHECKED_TOKENS) : tail.num_known].tolist()
        return history.last_tokens(place, len(last)) == last


def _domain(extra_keys: tuple[bytes, ...]) -> int:
    return hash(extra_keys) if extra_keys else 0


def likely_continuation(history: TokenHistory, place: int, most: int) -> list[int]:
    """Up to `most` tokens that may follow `place`: each the one that followed most of the longest matches."""
    ends = _longest_matches(history, place) if most else []
    chance = 1.0
    tokens: list[int] = []
    while ends and len(tokens) < most:
        following: defaultdict[int, list[int]] = defaultdict(list)
        for end in ends:
            after = history.after(end)
            if after is not None:
                following[history.token(after)].append(after)
        if not following:
            break
        token = max(following, key=lambda token: len(following[token]))
        chance *= len(following[token]) / len(ends)
        if chance < LEAST_CONFIDENCE:
            break
        tokens.append(token)
        ends = following[token]
    return tokens


def _longest_matches(history: TokenHistory, place: int) -> list[int]:
    """Of the matches looked at those that agree longest, the newest first."""
    longest, ends = 0, []
    for end in history.matches(place, MAX_MATCHES):
        length = history.common_length(place, end, MAX_MATCH_LENGTH)
        if length > longest:
            longest, ends = length, [end]
        elif length == longest:
            ends.append(end)
    return ends
