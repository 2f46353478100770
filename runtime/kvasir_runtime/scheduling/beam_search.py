"""Beam search over one prompt: which beams go on, and which hypotheses are complete. Pure bookkeeping over candidates.

Its result is that of Hugging Face's `generate(num_beams=width)`: every step the `width` best continuations that have
not ended go on; those among the best `width` that have ended become hypotheses, scored by their summed log-probability
over length ** length_penalty; the search ends when no beam can better the worst of `width` hypotheses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.step import Candidates


@dataclass(frozen=True, slots=True)
class Beam:
    output_token_ids: tuple[int, ...]
    logprob: float
    """Sum over the output."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete output."""

    beam: Beam
    score: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The next token of a beam."""

    parent: int
    """Index of the beam that it continues."""
    token_id: int
    beam: Beam


def num_candidates(width: int, num_stop_ids: int) -> int:
    """Continuations to look at in a step: enough that `width` are left when every stop token is among them."""
    return max(2, 1 + num_stop_ids) * width


@dataclass(slots=True)
class BeamSearchState:
    params: BeamSearch
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    """Output tokens at which every beam ends."""
    beams: list[Beam] = field(default_factory=lambda: [Beam((), 0.0)])
    """Those that go on, best first; at the start one, which has no output."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Best first, `width` at most."""
    _can_improve: bool = True

    def advance(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        """Take each beam's candidates (aligned with `beams`); the beams that go on, none when the search has ended."""
        width = self.params.width
        best = self._best_continuations(candidates)
        ended = [continuation for continuation in best[:width] if self._reason(continuation) is not None]
        open_ones = [continuation for continuation in best if self._reason(continuation) is None][:width]
        self._complete(ended)
        self.beams = [continuation.beam for continuation in open_ones]
        return open_ones if open_ones and not self._has_ended() else []

    def _best_continuations(self, candidates: Sequence[Candidates]) -> list[Continuation]:
        pool = [
            Continuation(parent, token_id, Beam((*beam.output_token_ids, token_id), beam.logprob + logprob))
            for parent, (beam, some) in enumerate(zip(self.beams, candidates, strict=True))
            for token_id, logprob in zip(some.token_ids, some.logprobs, strict=True)
        ]
        pool.sort(key=lambda continuation: -continuation.beam.logprob)
        return pool[: num_candidates(self.params.width, len(self.stop_token_ids))]

    def _reason(self, continuation: Continuation) -> Literal["stop", "length"] | None:
        num_tokens = len(continuation.beam.output_token_ids)
        if continuation.token_id in self.stop_token_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None

    def _complete(self, ended: list[Continuation]) -> None:
        is_full = len(self.hypotheses) == self.params.width
        if not self._can_improve or (is_full and self.params.early_stopping):
            return
        for continuation in ended:
            score = continuation.beam.logprob / len(continuation.beam.output_token_ids) ** self.params.length_penalty
            reason = self._reason(continuation)
            assert reason is not None
            self.hypotheses.append(Hypothesis(continuation.beam, score, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.params.width :]

    def _has_ended(self) -> bool:
        if len(self.hypotheses) < self.params.width:
            return False
        best = self.beams[0]
        possible = best.logprob / len(best.output_token_ids) ** self.params.length_penalty
        self._can_improve = self._can_improve and possible > self.hypotheses[-1].score
        return self.params.early_stopping or not self._can_improve
