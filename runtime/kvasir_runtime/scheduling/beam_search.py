"""Beam search: which beams of a prompt go on, which hypotheses are complete, and what that does to sequences.

`BeamSearchState` is pure bookkeeping over candidates. The scheduler makes a `BeamGroup` of a request that asks for a
search and hands `BeamSearches` what the ranks report; all else it does as for any group. A search moves on when the
candidates of all its beams are in: beams end, fork, or take their next token in their own row.

The result is that of Hugging Face's `generate(num_beams=width)`: every step the `width` best continuations that have
not ended go on; those among the best `width` that have ended become hypotheses, scored by their summed log-probability
over length ** length_penalty; the search ends when no beam can better the worst of `width` hypotheses.

A step ranks numbers, and makes beams only of those that survive, which share their parents' tokens. For 128 beams of
1,000 tokens it takes 3 ms; with a copy of the output for every candidate it took 500.
"""

import logging
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.requests.outputs import AddressedOutput, Outcome, SequenceOutput
from kvasir_runtime.requests.sampling_params import BeamSearch
from kvasir_runtime.scheduling.remote_kv import RemoteKv
from kvasir_runtime.scheduling.request import Request, Sequence, SequenceGroup
from kvasir_runtime.scheduling.sequences import Sequences
from kvasir_runtime.scheduling.step import Candidates

logger = logging.getLogger(__name__)

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OutputToken:
    """The last token of an output, and what is before it: outputs share what they have in common."""

    token_id: int
    before: "OutputToken | None" = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    last: OutputToken | None = None
    num_tokens: int = 0
    logprob: float = 0.0
    """Sum over the output."""

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Walks through the whole output, so for hypotheses that are handed out, not for every beam in every step."""
        backwards: list[int] = []
        token = self.last
        while token is not None:
            backwards.append(token.token_id)
            token = token.before
        return tuple(reversed(backwards))


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


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Candidates of all beams, the best first; of equal ones first that of the better beam."""

    parents: Int64Array  # [n], indices of beams
    token_ids: Int64Array  # [n]
    logprobs: NDArray[np.float64]  # [n], summed over the output


def num_candidates(width: int, num_stop_ids: int) -> int:
    """Continuations of each beam to look at in a step: the `width` best that do not end may all be one beam's, behind
    every stop token."""
    return width + num_stop_ids


@dataclass(slots=True)
class BeamSearchState:
    params: BeamSearch
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int
    """Output tokens at which every beam ends."""
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    """Those that go on, best first, all of one length; at the start one, which has no output."""
    hypotheses: list[Hypothesis] = field(default_factory=list)
    """Best first, `width` at most."""

    def anew(self) -> "BeamSearchState":
        """The same search from its start."""
        return BeamSearchState(self.params, self.stop_token_ids, self.min_tokens, self.max_tokens)

    def advance(self, candidates: Series[Candidates]) -> list[Continuation]:
        """Take each beam's candidates (aligned with `beams`); the beams that go on, none when the search has ended."""
        width, num_tokens = self.params.width, self.beams[0].num_tokens + 1
        ranking = rank(self.beams, candidates)
        is_stop = self._is_stop(ranking.token_ids, num_tokens)
        has_ended = is_stop | (num_tokens >= self.max_tokens)
        ended = np.flatnonzero(has_ended[:width]).tolist()
        going_on = np.flatnonzero(~has_ended)[:width].tolist()
        self._complete([self._hypothesis(self._continue(ranking, place), is_stop=is_stop[place]) for place in ended])
        open_ones = [self._continue(ranking, place) for place in going_on]
        self.beams = [continuation.beam for continuation in open_ones]
        return open_ones if open_ones and not self._has_ended() else []

    def _is_stop(self, token_ids: Int64Array, num_tokens: int) -> NDArray[np.bool_]:
        if num_tokens <= self.min_tokens:
            return np.zeros(len(token_ids), dtype=np.bool_)
        return np.isin(token_ids, np.fromiter(self.stop_token_ids, dtype=np.int64))

    def _continue(self, ranking: Ranking, place: int) -> Continuation:
        parent, token_id = int(ranking.parents[place]), int(ranking.token_ids[place])
        beam = self.beams[parent]
        longer = Beam(OutputToken(token_id, beam.last), beam.num_tokens + 1, float(ranking.logprobs[place]))
        return Continuation(parent, token_id, longer)

    def _hypothesis(self, ended: Continuation, *, is_stop: bool) -> Hypothesis:
        score = self._score(ended.beam.logprob, ended.beam.num_tokens)
        return Hypothesis(ended.beam, score, "stop" if is_stop else "length")

    def _score(self, logprob: float, num_tokens: int) -> float:
        """The API process lets exponents of -10 to 10 pass: of a million tokens that is 1e60, which a float holds."""
        return logprob / float(num_tokens**self.params.length_penalty)

    def _complete(self, ended: list[Hypothesis]) -> None:
        best_first = sorted([*self.hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)
        self.hypotheses = best_first[: self.params.width]

    def _has_ended(self) -> bool:
        if len(self.hypotheses) < self.params.width:
            return False
        return self.params.early_stopping is True or self._best_to_come() <= self.hypotheses[-1].score

    def _best_to_come(self) -> float:
        """The score of the best beam; with "never" the best that it could get, were all tokens to come certain."""
        best, params = self.beams[0], self.params
        grows = params.early_stopping == "never" and params.length_penalty > 0
        return self._score(best.logprob, self.max_tokens if grows else best.num_tokens)


def rank(beams: Series[Beam], candidates: Series[Candidates]) -> Ranking:
    """By the summed log-probability that each comes to. What is not a number is impossible: nothing compares to it."""
    parents = np.repeat(np.arange(len(beams)), [len(some.token_ids) for some in candidates])
    token_ids = np.concatenate([np.array(some.token_ids, dtype=np.int64) for some in candidates])
    logprobs = np.concatenate([np.array(some.logprobs, dtype=np.float64) for some in candidates])
    logprobs = np.fmax(logprobs, -np.inf) + np.array([beam.logprob for beam in beams])[parents]
    best_first = np.argsort(-logprobs, kind="stable")
    return Ranking(parents[best_first], token_ids[best_first], logprobs[best_first])


@dataclass(slots=True, eq=False, kw_only=True)
class BeamGroup(SequenceGroup):
    """The request has a sequence for each beam of the state, in its order."""

    request: Request
    state: BeamSearchState
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Row -> what the rank has reported for the step being awaited."""

    @property
    def is_complete(self) -> bool:
        """Whether every beam's candidates are in."""
        return len(self.candidates) == len(self.request.sequences)

    def advance(self) -> list[Continuation]:
        candidates = [self.candidates[sequence.row] for sequence in self.request.sequences]
        self.candidates.clear()
        return self.state.advance(candidates)

    def restart(self) -> None:
        self.state = self.state.anew()
        self.candidates.clear()

    def outputs(self) -> list[SequenceOutput]:
        """The best hypotheses, as the client wanted them."""
        return [
            self._output(index, hypothesis)
            for index, hypothesis in zip(self.indices, self.state.hypotheses, strict=False)
        ]

    def _output(self, index: int, hypothesis: Hypothesis) -> SequenceOutput:
        request, token_ids = self.request, list(hypothesis.beam.output_token_ids)
        return SequenceOutput(
            request_id=request.request_id,
            index=index,
            new_token_ids=token_ids,
            prompt_logprobs=request.all_scores,
            num_cached_tokens=request.num_cached_tokens or 0,
            finish_reason=hypothesis.finish_reason,
            stop_token_id=token_ids[-1] if hypothesis.finish_reason == "stop" else None,
        )


def beam_group(request: Request, params: BeamSearch, indices: list[int]) -> BeamGroup:
    """`indices`: of the hypotheses that the client wants."""
    sampling = request.spec.sampling
    max_tokens = request.max_total_tokens - request.num_prompt_tokens
    return BeamGroup(
        description=f"the beam search of width {params.width}",
        num_rows=params.width,
        num_candidates=num_candidates(params.width, len(set(sampling.stop_token_ids))),
        indices=indices,
        request=request,
        state=BeamSearchState(params, frozenset(sampling.stop_token_ids), sampling.min_tokens, max_tokens),
    )


class BeamSearches:
    def __init__(self, sequences: Sequences, remote: RemoteKv) -> None:
        self._sequences = sequences
        self._rows = sequences.rows
        self._kv = sequences.kv
        self._remote = remote

    def take(self, candidates: dict[int, Candidates], rows: list[int], outcome: Outcome) -> None:
        """Candidates of some of the `rows`; a search goes on when those of all its beams are in."""
        reported: dict[BeamGroup, None] = {}
        for row in rows:
            sequence = self._rows.sequences[row]
            if sequence is not None and row in candidates:
                group = sequence.request.group
                assert isinstance(group, BeamGroup)
                group.candidates[row] = candidates[row]
                reported[group] = None
        for group in reported:
            if group.is_complete:
                self._advance(group, outcome)

    def _advance(self, group: BeamGroup, outcome: Outcome) -> None:
        try:
            continuations = group.advance()  # touches nothing but the search, so it can fail alone
        except Exception as error:
            logger.exception("a beam search failed", extra={"request_id": group.request.request_id})
            outcome.outputs += self._sequences.give_up(group.request.request_id, f"the beam search failed: {error}")
            return
        if not continuations:
            self._end(group, outcome)
            return
        parents = group.request.sequences
        num_tokens = int(self._rows.num_known[parents[0].row])
        living = {continuation.parent for continuation in continuations}
        group.spare_rows += [self._retire(sequence) for index, sequence in enumerate(parents) if index not in living]
        survivors = [parents[index] for index in sorted(living)]
        group.request.sequences = survivors
        num_forks = len(continuations) - len(survivors)
        if self._sequences.free_pages(survivors[0], num_forks * self._kv.fork_pages(num_tokens)):
            group.request.sequences = self._place(group, parents, continuations, num_tokens)
        elif len(self._sequences.running) > len(survivors) or self._remote.holds_pages:
            self._sequences.preempt(survivors[0])
        else:
            self._sequences.give_up_too_large(group.request)

    def _place(
        self, group: BeamGroup, parents: list[Sequence], continuations: list[Continuation], num_tokens: int
    ) -> list[Sequence]:
        """A sequence for each continuation: its parent for the first of a parent's, forks for the others."""
        has_gone_on: set[int] = set()
        placed: list[Sequence] = []
        for continuation in continuations:  # forks first: a parent's row is copied as it was
            sequence = parents[continuation.parent]
            if continuation.parent in has_gone_on:
                child = self._sequences.new_member(group.request, sequence.sampling, [], sequence.blocks)
                self._sequences.fork(sequence, {child: group.spare_rows.pop()}, num_tokens)
                sequence = child
            has_gone_on.add(continuation.parent)
            placed.append(sequence)
        for sequence, continuation in zip(placed, continuations, strict=True):
            self._append(sequence, num_tokens, continuation.token_id)
        return placed

    def _append(self, sequence: Sequence, position: int, token_id: int) -> None:
        self._rows.append(sequence.row, token_id)
        self._kv.offer_written(self._rows.known(sequence.row), sequence.blocks, position)
        self._kv.free_behind(sequence.blocks, position)
        self._rows.refresh(sequence)

    def _retire(self, sequence: Sequence) -> int:
        """Stop a beam that nothing continues; its row, which stays with the search."""
        row = sequence.row
        self._sequences.stop(sequence)
        self._rows.reserve(row)
        return row

    def _end(self, group: BeamGroup, outcome: Outcome) -> None:
        request = group.request
        for sequence in list(request.sequences):
            known = self._rows.known(sequence.row)
            self._kv.offer_written(known, sequence.blocks, len(known))
            self._sequences.end(sequence)
        outcome.outputs += [AddressedOutput(request.api_index, output) for output in group.outputs()]
