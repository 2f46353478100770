"""Beam searches in the scheduler: a row for each beam, rows kept free for those to come, and a step for all at once.

The scheduler makes a `BeamGroup` of a request that asks for one and hands `BeamSearches` the ranks' candidates; all
else it does as for any group. A search moves on when the candidates of all its beams are in: beams end, fork, or take
their next token in their own row.
"""

import logging
from dataclasses import dataclass, field

from kvasir_runtime.requests.outputs import AddressedOutput, Outcome, SequenceOutput
from kvasir_runtime.scheduling.beam_search import BeamSearchState, Continuation, Hypothesis, num_candidates
from kvasir_runtime.scheduling.remote_kv import RemoteKv
from kvasir_runtime.scheduling.request import Request, Sequence, SequenceGroup, Status
from kvasir_runtime.scheduling.sequences import Sequences
from kvasir_runtime.scheduling.step import Candidates

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class BeamGroup(SequenceGroup):
    """A sequence for each beam of the state, in its order."""

    request: Request
    state: BeamSearchState
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Row -> what the rank has reported for the step being awaited."""

    @property
    def is_complete(self) -> bool:
        """Whether every beam's candidates are in."""
        return len(self.candidates) == len(self.sequences)

    def advance(self) -> list[Continuation]:
        candidates = [self.candidates[sequence.row] for sequence in self.sequences]
        self.candidates.clear()
        return self.state.advance(candidates)

    def restart(self) -> None:
        super(BeamGroup, self).restart()  # a dataclass with slots is another class than the one that `super()` means
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


def beam_group(request: Request, indices: list[int]) -> BeamGroup | None:
    """None where the request does not ask for a beam search. `indices`: of the hypotheses that the client wants."""
    params, sampling = request.spec.beam, request.spec.sampling
    if params is None:
        return None
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
            logger.exception("the beam search of %s failed", group.request.request_id)
            outcome.outputs += self._sequences.give_up(group.request, f"the beam search failed: {error}")
            return
        if not continuations:
            self._end(group, outcome)
            return
        parents = group.sequences
        num_tokens = int(self._rows.num_known[parents[0].row])
        living = {continuation.parent for continuation in continuations}
        group.spare_rows += [self._retire(sequence) for index, sequence in enumerate(parents) if index not in living]
        survivors = [parents[index] for index in sorted(living)]
        group.sequences, group.request.sequences = survivors, list(survivors)
        num_forks = len(continuations) - len(survivors)
        if self._sequences.free_pages(survivors[0], num_forks * self._kv.fork_pages(num_tokens)):
            group.sequences = self._place(group, parents, continuations, num_tokens)
            group.request.sequences = list(group.sequences)
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
        sequence.status = Status.FINISHED
        self._rows.reserve(row)
        return row

    def _end(self, group: BeamGroup, outcome: Outcome) -> None:
        request = group.request
        for sequence in list(group.sequences):
            known = self._rows.known(sequence.row)
            self._kv.offer_written(known, sequence.blocks, len(known))
            self._sequences.end(sequence)
        outcome.outputs += [AddressedOutput(request.api_index, output) for output in group.outputs()]
