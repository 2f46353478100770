"""Moves beam searches on when their candidates are in: beams end, fork, or take their next token in their own row."""

import logging

from kvasir_runtime.scheduling.beam_search import Continuation
from kvasir_runtime.scheduling.beams import BeamGroup
from kvasir_runtime.scheduling.remote_kv import RemoteKv
from kvasir_runtime.scheduling.request import Sequence, Status
from kvasir_runtime.scheduling.requests import Requests
from kvasir_runtime.scheduling.running_set import RunningSet
from kvasir_runtime.scheduling.step import Candidates
from kvasir_runtime.scheduling.update import AddressedOutput, Outcome

logger = logging.getLogger(__name__)


class BeamStep:
    def __init__(self, running: RunningSet, requests: Requests, remote: RemoteKv) -> None:
        self._running = running
        self._rows = running.rows
        self._kv = running.kv
        self._requests = requests
        self._remote = remote

    def take(self, candidates: dict[int, Candidates], rows: list[int], outcome: Outcome) -> None:
        """Candidates of some of the `rows`; a search goes on when those of all its beams are in."""
        reported: dict[str, BeamGroup] = {}
        for row in rows:
            sequence = self._rows.sequences[row]
            if sequence is not None and row in candidates:
                request_id = sequence.request.request_id
                group = reported[request_id] = self._requests.beams[request_id]
                group.candidates[row] = candidates[row]
        for group in reported.values():
            if group.is_complete:
                self._advance(group, outcome)

    def _advance(self, group: BeamGroup, outcome: Outcome) -> None:
        try:
            continuations = group.advance()  # touches nothing but the search, so it can fail alone
        except Exception as error:
            logger.exception("the beam search of %s failed", group.request.request_id)
            outcome.outputs += self._requests.give_up(group.request, f"the beam search failed: {error}")
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
        if self._requests.free_pages(survivors[0], num_forks * self._kv.fork_pages(num_tokens)):
            group.sequences = self._place(group, parents, continuations, num_tokens)
            group.request.sequences = list(group.sequences)
        elif len(self._running.sequences) > len(survivors) or self._remote.holds_pages:
            self._requests.preempt(survivors[0])
        else:
            self._requests.give_up_outgrown(group.request)

    def _place(
        self, group: BeamGroup, parents: list[Sequence], continuations: list[Continuation], num_tokens: int
    ) -> list[Sequence]:
        """A sequence for each continuation: its parent for the first of a parent's, forks for the others."""
        has_heir: set[int] = set()
        placed: list[Sequence] = []
        for continuation in continuations:  # forks first: a parent's row is copied as it was
            sequence = parents[continuation.parent]
            if continuation.parent in has_heir:
                child = self._requests.new_beam(group, sequence.sampling, [], sequence.blocks)
                untold = self._running.untold_writes(sequence, num_tokens)
                self._running.fork(sequence, child, num_tokens, group.spare_rows.pop(), untold)
                sequence = child
            has_heir.add(continuation.parent)
            placed.append(sequence)
        for sequence, continuation in zip(placed, continuations, strict=True):
            self._append(sequence, num_tokens, continuation.token_id)
        return placed

    def _append(self, sequence: Sequence, position: int, token_id: int) -> None:
        self._rows.append(sequence.row, token_id)
        self._running.changes.token_writes.append((sequence.row, position, token_id))
        self._kv.offer_written(self._rows.known(sequence.row), sequence.blocks, position)
        self._kv.free_behind(sequence.blocks, position)
        self._rows.refresh(sequence)

    def _retire(self, sequence: Sequence) -> int:
        """Stop a beam that nothing continues; its row, which stays with the search."""
        row = sequence.row
        self._running.stop(sequence)
        sequence.status = Status.FINISHED
        self._rows.reserve(row)
        return row

    def _end(self, group: BeamGroup, outcome: Outcome) -> None:
        request = group.request
        for sequence in list(group.sequences):
            known = self._rows.known(sequence.row)
            self._kv.offer_written(known, sequence.blocks, len(known))
            self._requests.end(sequence)
        outcome.outputs += [AddressedOutput(request.api_index, output) for output in group.outputs()]
