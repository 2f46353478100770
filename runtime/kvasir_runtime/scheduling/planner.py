"""Puts a step together: decodes first, whatever their rank, then prompts under way, then those that wait.

Decodes first, so that no prompt takes a running stream's tokens. When blocks run out, the running sequence of the
highest rank is preempted; a step that preempted admits nobody. A chunk of a prompt is cut to the blocks that are free.
"""

from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile

import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.blocks import Block
from kvasir_runtime.kv_cache.kv_cache import Prefix
from kvasir_runtime.scheduling.request import Sequence, Status
from kvasir_runtime.scheduling.running_rows import PendingUpdates, where
from kvasir_runtime.scheduling.sequences import Sequences
from kvasir_runtime.scheduling.step import DraftDepth, ReturnedTokens, Rows, SchedulerLimits, StepBudget, StepPlan


@dataclass(slots=True)
class StepDraft:
    """What a step computes, while it is put together."""

    budget: int
    """Tokens that may still be computed."""
    decode_rows: Rows
    decode_starts: Rows
    decode_lengths: Rows
    """One token each, and drafts."""
    chunk_rows: list[int] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)
    chunk_samples: list[bool] = field(default_factory=list)
    announced: list[Block] = field(default_factory=list)
    """Blocks that became findable because this step writes them."""
    num_proposals: int = 0
    returned: ReturnedTokens | None = None

    @classmethod
    def empty(cls, budget: int) -> "StepDraft":
        nothing = np.empty(0, dtype=np.int64)
        return cls(budget, nothing, nothing, nothing)

    @property
    def is_empty(self) -> bool:
        return not len(self.decode_rows) and not self.chunk_rows

    def set_decodes(self, rows: Rows, starts: Rows, lengths: Rows) -> None:
        self.budget -= int(lengths.sum())
        self.decode_rows, self.decode_starts, self.decode_lengths = rows, starts, lengths

    def keep_decodes(self, is_kept: NDArray[np.bool_]) -> None:
        self.decode_rows, self.decode_starts = self.decode_rows[is_kept], self.decode_starts[is_kept]
        self.decode_lengths = self.decode_lengths[is_kept]

    def add_chunk(self, row: int, start: int, length: int, blocks: list[Block], *, samples: bool) -> None:
        self.budget -= length
        self.announced += blocks
        self.chunk_rows.append(row)
        self.chunk_starts.append(start)
        self.chunk_lengths.append(length)
        self.chunk_samples.append(samples)

    def plan(self, number: int, pending: PendingUpdates, num_failures: int) -> StepPlan:
        num_decodes = len(self.decode_rows)
        samples = np.empty(num_decodes + len(self.chunk_rows), dtype=np.bool_)
        samples[:num_decodes], samples[num_decodes:] = True, self.chunk_samples
        return StepPlan(
            number=number,
            added=tuple(pending.added),
            forks=tuple(pending.forks),
            table_writes=_int32(pending.table_writes, 4),
            token_writes=_int32(pending.token_writes, 3),
            block_copies=_int32([copy[1:] for copy in pending.block_copies], 2),
            rows=_joined(self.decode_rows, self.chunk_rows),
            num_decodes=num_decodes,
            num_new_tokens=_joined(self.decode_lengths, self.chunk_lengths),
            starts=_joined(self.decode_starts, self.chunk_starts),
            samples=samples,
            num_proposals=self.num_proposals,
            returned=self.returned,
            num_failures=num_failures,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """The sequence that comes first was refused for want of pages. Until it may be admitted, its whole prompt is not
    matched against the prefix cache in every step.

    It is looked at again when what it needed is free, when it may need less because the block behind its cached
    beginning can be found now, when pages have arrived since for those behind it, which it may have, when another comes
    first, and whenever nobody runs. What else may help it is missed: of a KV group with a window the longer beginning
    may be further on, and cached blocks that it counted as free may be in others' use. Then it waits for some pages
    more than it needs, or until nobody runs, which comes to pass: those that run wait for nobody behind them, and
    nobody is admitted before it.
    """

    sequence: Sequence
    num_pages: int
    """That it needed to be free."""
    next_hash: list[bytes]
    """Of the block behind its cached beginning; none where it may find no more."""


class Planner:
    def __init__(self, limits: SchedulerLimits, sequences: Sequences, depth: DraftDepth | None) -> None:
        self._limits = limits
        self._sequences = sequences
        self._rows = sequences.rows
        self._kv = sequences.kv
        self._depth = depth
        self._refusal: Refusal | None = None

    def draft(self) -> StepDraft:
        """The next step; what it computes counts as planned from now on."""
        draft = StepDraft.empty(self._limits.max_num_batched_tokens)
        self._sequences.fork_ready()
        self._preempt_for_first()
        num_running = len(self._sequences.running)
        rows = self._decoding_rows()[: draft.budget]
        depths = self._depths(rows)
        self._take_decodes(draft, rows, depths)
        if self._limits.step_budget is not None and self._sequences.have_prompts:
            draft.budget = min(draft.budget, self._num_prompt_tokens(self._limits.step_budget, len(draft.decode_rows)))
        self._take_prompts(draft)
        if len(self._sequences.running) < num_running:
            self._drop_preempted(draft)
        else:
            self._admit_waiting(draft)
        draft.num_proposals = self._num_proposals(draft, depths)
        if self._limits.num_stages > 1:
            draft.returned = self._rows.take_returned(draft.decode_rows, draft.decode_lengths)
        return draft

    def _num_prompt_tokens(self, step_budget: StepBudget, num_decodes: int) -> int:
        sequences = self._sequences
        num_left = sequences.uncached.num_tokens + sequences.num_prefilling_tokens
        return step_budget.num_prompt_tokens(num_decodes, len(sequences.waiting) + len(sequences.prefilling), num_left)

    def _decoding_rows(self) -> Rows:
        """Running sequences whose last known token alone is left to compute."""
        state, rows = self._rows, self._sequences.rows_by_rank
        most_known = state.most_known[rows]
        can_go_on = (state.most_planned[rows] == most_known - 1) & (most_known < state.max_total[rows])
        if self._limits.num_stages > 1:
            rows = rows[can_go_on]
            return micro_batch(rows, state.is_awaited[rows], self._limits.num_stages)
        if state.num_that_wait:
            can_go_on &= ~state.is_awaited[rows]
        decoding: Rows = rows[can_go_on]
        return decoding

    def _depths(self, rows: Rows) -> Rows:
        """Drafts that pay for each row; none where the core chooses tokens."""
        if self._depth is None or not len(rows):
            return np.zeros(len(rows), dtype=np.int64)
        depths: Rows = self._depth.depths(rows).astype(np.int64, copy=False)
        return np.where(self._rows.draws[rows], depths, 0) if self._rows.num_that_wait else depths

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
        draft.set_decodes(rows, most_known - 1, num_drafts + 1)
        state.plan_decodes(rows, most_known, num_drafts)

    def _num_drafts(self, rows: Rows, depths: Rows, budget: int) -> Rows:
        """Drafts to verify for each row: what pays, is there, and can still be sent."""
        state = self._rows
        left = state.max_total[rows] - state.most_known[rows] - 1
        spare = budget - len(rows)
        if self._sequences.have_prompts:
            spare //= 2  # drafts are a guess, a prompt's tokens are not
        affordable = spare // len(rows)
        wanted = np.minimum(depths, state.num_ready_drafts[rows])
        return np.clip(np.minimum(wanted, affordable), 0, left)

    def _num_proposals(self, draft: StepDraft, depths: Rows) -> int:
        """Drafts that the rank should have ready for each sequence that samples in this step. Where the decodes want
        none, the prompts may: the proposer must see their chunks, sampled after or not."""
        if self._depth is None:
            return 0
        rows = draft.decode_rows
        if draft.chunk_rows:
            rows = np.concatenate((rows, np.array(draft.chunk_rows, dtype=np.int64)))
            rows = rows[self._rows.draws[rows]]
        num_proposals = int(depths.max(initial=0))
        if draft.chunk_rows and len(rows) and not num_proposals:
            num_proposals = int(self._depths(rows).max())
        self._rows.num_ready_drafts[rows] = num_proposals
        return num_proposals

    def _make_room_to_decode(self, row: int, num_tokens: int, num_wanted: int) -> None:
        """Blocks for the next token, at others' cost if need be, and for drafts where they cost nobody anything."""
        sequence = self._rows.sequences[row]
        if sequence is None:
            return  # preempted for one before it
        if not self._sequences.try_grow(sequence, num_wanted):
            num_pages = self._kv.num_pages(sequence.blocks, num_tokens)
            if self._sequences.free_pages(sequence, num_pages):
                self._sequences.grow(sequence, num_tokens)

    def _take_prompts(self, draft: StepDraft) -> None:
        """Prompts that are partly computed."""
        for sequence in list(self._sequences.prefilling):
            if draft.budget and sequence.status is Status.RUNNING:
                planned, known = int(self._rows.most_planned[sequence.row]), int(self._rows.num_known[sequence.row])
                length = self._fitting(sequence, planned, min(sequence.num_to_compute(known) - planned, draft.budget))
                if length:  # else it has to wait
                    self._take_chunk(draft, sequence, length)

    def _fitting(self, sequence: Sequence, planned: int, length: int) -> int:
        """Of the next `length` tokens of a prompt, those for which there are blocks, at others' cost only where there
        is none for the first.

        So a prompt takes what is free before it preempts anybody, and whoever it preempts makes room for a block at
        least: the whole chunk may need more than all behind it hold, who then would be preempted in vain.
        """
        kv, blocks = self._kv, sequence.blocks
        self._sequences.give_up_kept(kv.num_pages(blocks, planned + length))
        if self._capacity(sequence) <= planned and (
            self._will_free_some(sequence, planned)
            or not self._sequences.free_pages(sequence, kv.num_pages(blocks, planned + 1))
        ):
            return 0
        return min(length, self._capacity(sequence) - planned)

    def _capacity(self, sequence: Sequence) -> int:
        """Tokens for which the sequence has blocks, or may have free ones."""
        return sequence.blocks.capacity + self._kv.pool.num_free // self._kv.num_groups * self._kv.block_size

    def _will_free_some(self, sequence: Sequence, planned: int) -> bool:
        """Whether its steps under way, when they end, leave blocks of it behind a window."""
        num_full, passed = planned // self._kv.block_size, sequence.blocks.num_passed
        return bool(self._rows.num_written[sequence.row] < planned) and any(
            group not in self._kv.groups_seeing(first, num_full) for group, first in enumerate(passed)
        )

    def _drop_preempted(self, draft: StepDraft) -> None:
        """Compute nothing of sequences that were preempted for others: of their decodes, for no chunk is there yet,
        since every sequence is preempted only by one that comes before it."""
        draft.keep_decodes(self._rows.capacity[draft.decode_rows] > 0)
        assert all(self._rows.capacity[draft.chunk_rows] > 0)

    def _preempt_for_first(self) -> None:
        """Where the sequence that comes first lacks a row or pages, preempt running ones that the policy lets it, and
        only where that makes room for it. They wait behind it, so none takes its place back."""
        first, running = self._sequences.waiting.peek(), self._sequences.running
        if first is None or not running or not self._sequences.waiting.may_preempt(first, running[-1]):
            return
        victims = list(takewhile(partial(self._sequences.waiting.may_preempt, first), reversed(running)))
        if not self._can_make_room(first, victims):
            return
        for victim in victims:
            if not self._lacks_room(first):
                return
            if victim.status is Status.RUNNING:  # a group is preempted as one
                self._sequences.preempt(victim)

    def _can_make_room(self, first: Sequence, victims: list[Sequence]) -> bool:
        prefix, num_pages = self._prefix_of(first)
        if first.request.num_rows > self._rows.num_free + len(victims):
            return False
        return num_pages <= self._kv.pool.num_free + self._kv.num_freed((each.blocks for each in victims), prefix)

    def _lacks_room(self, first: Sequence) -> bool:
        return first.request.num_rows > self._rows.num_free or self._prefix_of(first)[1] > self._kv.pool.num_free

    def _prefix_of(self, sequence: Sequence) -> tuple[Prefix, int]:
        """What is cached of a sequence that waits, and the pages that must be free before it is admitted."""
        kv, token_ids = self._kv, sequence.token_ids
        recomputes = sequence.request.recomputes_prompt
        prefix = kv.no_prefix() if recomputes else kv.match(token_ids, sequence.blocks)
        return prefix, kv.num_pages_to_admit(prefix, len(token_ids), self._limits.max_num_batched_tokens)

    def _admit_waiting(self, draft: StepDraft) -> None:
        while draft.budget and self._rows.num_free:
            sequence = self._sequences.waiting.peek()
            if sequence is None or self._is_refused_still(sequence) or not self._admit(draft, sequence):
                return

    def _is_refused_still(self, sequence: Sequence) -> bool:
        """Whether there is no use in matching the prompt of the sequence that comes first, while others run."""
        refusal, kv = self._refusal, self._kv
        return (
            refusal is not None
            and sequence is refusal.sequence
            and bool(self._sequences.running)
            and kv.pool.num_free < refusal.num_pages
            and not kv.num_cached(refusal.next_hash)
            and not self._sequences.kept.has_others(sequence.request.request_id)
        )

    def _admit(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Move a waiting sequence into the step, if rows, and blocks for all of its known tokens, are to be had."""
        request, kv, token_ids = sequence.request, self._kv, sequence.token_ids
        if request.num_rows > self._rows.num_free:
            return False
        prefix, num_pages = self._prefix_of(sequence)
        num_new = sequence.num_to_compute(len(token_ids)) - prefix.num_tokens
        if num_new > draft.budget and not self._limits.enable_chunked_prefill:
            return False
        while num_pages > kv.pool.num_free and self._sequences.give_up_one_kept(keep=request.request_id):
            num_pages = kv.num_pages_to_admit(prefix, len(token_ids), self._limits.max_num_batched_tokens)
        if num_pages > kv.pool.num_free and not self._sequences.running and self._sequences.give_up_one_kept():
            return self._admit(draft, sequence)  # its own, not all of which it finds: nobody else makes room
        if num_pages > kv.pool.num_free:
            self._refusal = self._refused(sequence, prefix.num_tokens, num_pages)
            return False
        self._refusal = None
        self._sequences.admit(sequence, prefix)
        if num_new:  # none where its prompt is cached up to where others fork
            self._take_chunk(draft, sequence, min(num_new, draft.budget))
        return True

    def _refused(self, sequence: Sequence, num_cached: int, num_pages: int) -> Refusal:
        first = num_cached // self._kv.block_size
        hashes = self._kv.hashes_to_look_up(sequence.token_ids, sequence.blocks)
        return Refusal(sequence, num_pages, hashes[first : first + 1])

    def _take_chunk(self, draft: StepDraft, sequence: Sequence, length: int) -> None:
        """Compute the next `length` tokens of a prompt, for which pages are free."""
        state, row = self._rows, sequence.row
        start = int(state.most_planned[row])
        end = start + length
        self._sequences.grow(sequence, end)
        announced = self._kv.offer(state.known(row), sequence.blocks, end)
        draft.add_chunk(row, start, length, announced, samples=state.plan_chunk(row, end))
        state.refresh(sequence)
        if state.is_prefilled(row, end):
            self._sequences.prefilling.remove(sequence)


def micro_batch(rows: Rows, is_awaited: NDArray[np.bool_], num_stages: int) -> Rows:
    """Of all rows that decode, by rank, those of a pipeline's next step: an even part, none of which a step under way
    holds, since a sequence decodes in one step under way at most.

    No row is passed over for long: a step that leaves some out follows steps that held less than their part.
    """
    part = -(-len(rows) // num_stages)
    ready: Rows = rows[~is_awaited]
    return ready[:part]


def _joined(decodes: Rows, chunks: list[int]) -> NDArray[np.int32]:
    if not chunks:
        return decodes.astype(np.int32)
    return np.concatenate((decodes, chunks)).astype(np.int32)


def _int32(values: Series[tuple[int, ...]], width: int) -> NDArray[np.int32]:
    if not values:
        return np.empty((0, width), dtype=np.int32)
    return np.fromiter(chain.from_iterable(values), np.int32).reshape(-1, width)
