"""Puts a step together: decodes first, whatever their rank, then prompts under way, then those that wait.

Decodes first, so that no prompt takes a running stream's tokens. When blocks run out, the running sequence of the
highest rank is preempted; a step that preempted admits nobody. A chunk of a prompt is cut to the blocks that are free.
"""

from bisect import insort
from operator import attrgetter

import msgspec
import numpy as np

from kvasir_runtime.scheduling.limits import DraftDepth, Rows, SchedulerLimits
from kvasir_runtime.scheduling.micro_batches import micro_batch, take_returned
from kvasir_runtime.scheduling.policies import WaitingQueue
from kvasir_runtime.scheduling.refusal import Refusal
from kvasir_runtime.scheduling.request import Sequence, Status
from kvasir_runtime.scheduling.requests import Requests
from kvasir_runtime.scheduling.running_rows import where
from kvasir_runtime.scheduling.running_set import RunningSet
from kvasir_runtime.scheduling.step import NewSequence
from kvasir_runtime.scheduling.step_draft import StepDraft


class Planner:
    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        running: RunningSet,
        requests: Requests,
        depth: DraftDepth | None,
    ) -> None:
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._rows = running.rows
        self._kv = running.kv
        self._requests = requests
        self._depth = depth
        self._refusal: Refusal | None = None

    def draft(self) -> StepDraft:
        """The next step; what it computes counts as planned from now on."""
        draft = self._running.draft = StepDraft.empty(self._limits.max_num_batched_tokens)
        for parent in list(self._running.parents):
            self._requests.fork_heirs(parent)
        rows = self._decoding_rows()[: draft.budget]
        depths = self._depths(rows)
        self._take_decodes(draft, rows, depths)
        self._take_prompts(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        self._running.draft = None
        draft.num_proposals = self._num_proposals(draft, depths)
        if self._limits.num_stages > 1:
            draft.returned = take_returned(self._rows, draft.decode_rows, draft.decode_lengths)
        return draft

    def _decoding_rows(self) -> Rows:
        """Running sequences whose last known token alone is left to compute."""
        state, rows = self._rows, self._running.rows_by_rank()
        most_known = state.most_known[rows]
        can_go_on = (state.most_planned[rows] == most_known - 1) & (most_known < state.max_total[rows])
        if self._limits.num_stages > 1:
            rows = rows[can_go_on]
            return micro_batch(rows, state.is_awaited[rows], self._limits.num_stages)
        if self._requests.beams:
            can_go_on &= ~state.is_awaited[rows]
        decoding: Rows = rows[can_go_on]
        return decoding

    def _depths(self, rows: Rows) -> Rows:
        """Drafts that pay for each row; none for beams."""
        if self._depth is None or not len(rows):
            return np.zeros(len(rows), dtype=np.int64)
        depths: Rows = self._depth.depths(rows).astype(np.int64, copy=False)
        return np.where(self._rows.is_beam[rows], 0, depths) if self._requests.beams else depths

    def _take_decodes(self, draft: StepDraft, rows: Rows, depths: Rows) -> None:
        state, lookahead = self._rows, 0 if self._depth is None else int(depths.max(initial=0))
        most_known = wanted = state.most_known[rows]
        num_drafts = depths
        if lookahead:  # a proposer may compute so many tokens beyond the step's own after it
            num_drafts = self._num_drafts(rows, depths, draft.budget)
            wanted = np.minimum(most_known + num_drafts + lookahead, state.max_total[rows])
        (short,) = (wanted > state.capacity[rows]).nonzero()
        if len(short):
            some = (rows[short].tolist(), most_known[short].tolist(), wanted[short].tolist())
            for row, num_tokens, num_wanted in zip(*some, strict=True):
                self._make_room_to_decode(row, num_tokens, num_wanted)
            capacity = state.capacity[rows]
            kept = where(capacity >= most_known)  # a preempted row has none
            rows, most_known = rows[kept], most_known[kept]
            num_drafts = num_drafts[kept]
            if lookahead:
                num_drafts = np.minimum(num_drafts, capacity[kept] - most_known)
        lengths = num_drafts + 1
        draft.set_decodes(rows, most_known - 1, lengths)
        state.most_known[rows] = most_known + lengths
        state.most_planned[rows] = most_known + num_drafts
        if self._requests.beams or self._limits.num_stages > 1:
            state.is_awaited[rows] = state.waits_for_result[rows]

    def _num_drafts(self, rows: Rows, depths: Rows, budget: int) -> Rows:
        """Drafts to verify for each row: what pays, is there, and can still be sent."""
        state = self._rows
        left = state.max_total[rows] - state.most_known[rows] - 1
        spare = budget - len(rows)
        if len(self._waiting) or self._running.prefilling:
            spare //= 2  # drafts are a guess, a prompt's tokens are not
        affordable = spare // len(rows)
        wanted = np.minimum(depths, state.num_ready_drafts[rows])
        return np.clip(np.minimum(wanted, affordable), 0, left)

    def _num_proposals(self, draft: StepDraft, depths: Rows) -> int:
        """Drafts that the rank should have ready for each sequence that samples in this step. Where the decodes want
        none, the prompts may: their chunks, sampled after or not, must be shown to the proposer."""
        if self._depth is None:
            return 0
        rows = draft.decode_rows
        if draft.chunk_rows:
            rows = np.concatenate((rows, np.array(draft.chunk_rows, dtype=np.int64)))
            rows = rows[~self._rows.is_beam[rows]]
        num_proposals = int(depths.max(initial=0))
        if draft.chunk_rows and len(rows) and not num_proposals:
            num_proposals = self._depth.most_depth(rows) if len(depths) else int(self._depths(rows).max())
        self._rows.num_ready_drafts[rows] = num_proposals
        return num_proposals

    def _make_room_to_decode(self, row: int, num_tokens: int, num_wanted: int) -> None:
        """Blocks for the next token, at others' cost if need be, and for drafts where they cost nobody anything."""
        sequence = self._rows.sequences[row]
        if sequence is None:
            return  # preempted for one before it
        if not self._running.try_grow(sequence, num_wanted):
            num_pages = self._kv.num_pages(sequence.blocks, num_tokens)
            if self._requests.free_pages(sequence, num_pages):
                self._running.grow(sequence, num_tokens)

    def _take_prompts(self, draft: StepDraft) -> None:
        """Prompts that are partly computed."""
        for sequence in list(self._running.prefilling):
            if draft.budget and sequence.status is Status.RUNNING:
                planned = int(self._rows.most_planned[sequence.row])
                known = int(self._rows.num_known[sequence.row])
                length = self._fitting(sequence, planned, min(num_to_compute(sequence, known) - planned, draft.budget))
                if length:  # else it has to wait
                    self._running.grow(sequence, planned + length)
                    self._take_chunk(draft, sequence, length)

    def _fitting(self, sequence: Sequence, planned: int, length: int) -> int:
        """Of the next `length` tokens of a prompt, those for which there are blocks, at others' cost only where there
        is none for the first.

        So a prompt takes what is free before it preempts anybody, and whoever it preempts makes room for a block at
        least: the whole chunk may need more than all behind it hold, who then would be preempted in vain.
        """
        kv, blocks = self._kv, sequence.blocks
        self._requests.give_up_landed(kv.num_pages(blocks, planned + length))
        if self._capacity(sequence) <= planned and (
            self._lets_go_of_some(sequence, planned)
            or not self._requests.free_pages(sequence, kv.num_pages(blocks, planned + 1))
        ):
            return 0
        return min(length, self._capacity(sequence) - planned)

    def _capacity(self, sequence: Sequence) -> int:
        """Tokens for which the sequence has blocks, or may have free ones."""
        return sequence.blocks.capacity + self._kv.pool.num_free // self._kv.num_groups * self._kv.block_size

    def _lets_go_of_some(self, sequence: Sequence, planned: int) -> bool:
        """Whether its steps under way, when they end, leave blocks of it behind a window."""
        num_full, passed = planned // self._kv.block_size, sequence.blocks.num_passed
        return bool(self._rows.num_written[sequence.row] < planned) and any(
            group not in self._kv.groups_seeing(first, num_full) for group, first in enumerate(passed)
        )

    def _admit_waiting(self, draft: StepDraft) -> None:
        while draft.budget and self._rows.num_free:
            sequence = self._waiting.peek()
            if sequence is None or self._is_refused_still(sequence) or not self._admit(draft, sequence):
                return

    def _is_refused_still(self, sequence: Sequence) -> bool:
        refusal, kv, landed = self._refusal, self._kv, self._requests.landed
        return refusal is not None and bool(self._running.sequences) and refusal.still_holds(sequence, kv, landed)

    def _admit(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Move a waiting sequence into the step, if rows, and blocks for all of its known tokens, are to be had."""
        request, kv, token_ids = sequence.request, self._kv, sequence.token_ids
        if (beam := request.spec.beam) is not None and beam.width > self._rows.num_free:
            return False
        prefix = kv.no_prefix() if request.lacks_prompt_logprobs else kv.match(token_ids, sequence.blocks)
        num_new = num_to_compute(sequence, len(token_ids)) - prefix.num_tokens
        if num_new > draft.budget and not self._limits.enable_chunked_prefill:
            return False
        num_pages = kv.num_pages_to_admit(prefix, len(token_ids), self._limits.max_num_batched_tokens)
        while num_pages > kv.pool.num_free and self._requests.landed.give_up_one(keep=request.request_id):
            num_pages = kv.num_pages_to_admit(prefix, len(token_ids), self._limits.max_num_batched_tokens)
        if num_pages > kv.pool.num_free and not self._running.sequences and self._requests.landed.give_up_one():
            return self._admit(draft, sequence)  # its own, not all of which it finds: nobody else makes room
        if num_pages > kv.pool.num_free:
            self._refusal = self._refused(sequence, prefix.num_tokens, num_pages)
            return False
        self._refusal = None
        self._waiting.remove(sequence)
        is_first_lookup = not (sequence.was_admitted or request.lacks_prompt_logprobs)
        writes = kv.adopt(sequence.blocks, prefix, len(token_ids) if is_first_lookup else 0)
        self._requests.landed.let_go(request.request_id)
        sequence.was_admitted = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
        self._running.start(sequence, token_ids, prefix.num_tokens, self._rows.take_row())
        self._tell_of_new(sequence, prefix.num_tokens)
        self._running.changes.write_tables(sequence.row, writes)
        if num_new:  # none where its prompt is cached up to where its heirs fork
            insort(self._running.prefilling, sequence, key=attrgetter("rank"))
            length = min(num_new, draft.budget)
            self._running.grow(sequence, prefix.num_tokens + length)
            self._take_chunk(draft, sequence, length)
        return True

    def _refused(self, sequence: Sequence, num_cached: int, num_pages: int) -> Refusal:
        first = num_cached // self._kv.block_size
        hashes = self._kv.hashes_to_look_up(sequence.token_ids, sequence.blocks)
        return Refusal(sequence, num_pages, hashes[first : first + 1])

    def _tell_of_new(self, sequence: Sequence, num_computed: int) -> None:
        request, sampling = sequence.request, sequence.sampling
        if not request.lacks_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        group = self._requests.beams.get(request.request_id)
        if group is not None:
            group.spare_rows = [self._rows.take_row() for _ in range(group.state.params.width - 1)]
        self._running.changes.added.append(
            NewSequence(
                sequence.row,
                request.spec.with_sampling(sampling),
                sequence.token_ids[request.num_prompt_tokens :],
                num_computed,
                num_candidates=0 if group is None else group.num_candidates,
            )
        )

    def _take_chunk(self, draft: StepDraft, sequence: Sequence, length: int) -> None:
        """Compute the next `length` tokens of a prompt, for which there are blocks."""
        state, row = self._rows, sequence.row
        start = int(state.most_planned[row])
        end = start + length
        is_last = bool(end == state.most_known[row])
        announced = self._kv.offer(state.known(row), sequence.blocks, end)
        draft.add_chunk(row, start, length, announced, samples=is_last)
        state.most_planned[row] = end
        state.most_known[row] += is_last
        state.is_awaited[row] = is_last and state.waits_for_result[row]
        state.refresh(sequence)
        if end >= state.num_known[row] - 1:  # a last token alone is computed like a decode's
            self._running.prefilling.remove(sequence)


def num_to_compute(sequence: Sequence, num_known: int) -> int:
    """Tokens to compute before it decodes, or its heirs fork from it."""
    return sequence.num_fork_tokens if sequence.heirs else num_known
