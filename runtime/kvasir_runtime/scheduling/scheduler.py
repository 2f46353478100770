"""Decides what each step computes: which sequences, how many tokens of each, and in which blocks.

Every step has one token budget (planner.py). The scheduler reads no clock and touches no device; `schedule` plans a
step and `update` takes its results, possibly several steps later. Planning is no commitment: a step that fails takes
back what it was to write.
"""

import itertools
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvasir_runtime.kv_cache.blocks import Block
from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import AddressedOutput, FinishReason, Outcome, SequenceOutput
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.scheduling.beam_search import BeamSearches, beam_group
from kvasir_runtime.scheduling.planner import Planner
from kvasir_runtime.scheduling.remote_kv import RemoteKv
from kvasir_runtime.scheduling.request import Sequence, request_from
from kvasir_runtime.scheduling.running_rows import DrawnTokens, KeptTokens, where
from kvasir_runtime.scheduling.sequences import Sequences
from kvasir_runtime.scheduling.step import DraftDepth, Rows, SchedulerLimits, StepPlan, StepResult
from kvasir_runtime.scheduling.waiting import PolicyName, WaitingQueue, waiting_queue
from kvasir_runtime.transfer.metrics import TransferStats


class StepUnderWay(msgspec.Struct, frozen=True, eq=False):
    """A step that was planned and whose results are not in."""

    plan: StepPlan
    rows: Rows
    """The plan's."""
    generations: Rows
    """Of the plan's rows: results for a row that has changed hands are dropped."""
    max_tokens_in_flight: Rows
    """That each of the rows can bring."""
    announced: list[Block]
    """Blocks that became findable because the step writes them."""
    chunks: list[Sequence]
    """Those of whose prompts it computes a part."""
    num_prompt_tokens: int
    """That it computes."""


STRAYED = (
    "the answer cannot be held to the grammar that was asked for: working out the next token takes more than "
    "llguidance's limits allow; ask for a simpler schema, regex or grammar"
)


@dataclass(slots=True)
class DraftCounts:
    """Of speculative decoding, since the start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    per_position: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, kv: KvCache, waiting: WaitingQueue, depth: DraftDepth | None = None
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._depth = depth
        self._limits = limits
        self._sequences = Sequences(limits, kv, waiting, depth)
        self._rows = self._sequences.rows
        self.remote = RemoteKv(self._sequences)
        """What other engines read from here, and what is pulled from them."""
        self._planner = Planner(limits, self._sequences, depth)
        self._beams = BeamSearches(self._sequences, self.remote)
        self._under_way: deque[StepUnderWay] = deque()
        self._step_numbers = itertools.count()
        self._num_failures = 0
        self._drafts = DraftCounts()

    @property
    def has_work(self) -> bool:
        """Whether a call of `schedule` may plan something without anything new from outside."""
        return self._sequences.num_held < len(self._sequences) or bool(self._sequences.rejected)

    def add(self, message: AddRequest, *, is_held: bool = False) -> None:
        """Take a request in. A held one waits outside the queue until `release`."""
        request = request_from(message, max_model_len=self._limits.max_model_len)
        if (beam := message.spec.beam) is not None:
            request.group = beam_group(request, beam, [start.index for start in message.sequences])
        self._sequences.add(request, message, is_held=is_held)

    def release(self, request_id: str) -> None:
        """Let a held request wait for its turn; unknown ids were aborted meanwhile."""
        self._sequences.release(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Forget a request, or one of its sequences, at once; unknown ones have just ended.

        One sequence of a group cannot be aborted: which outputs it has comes to light at the end.
        """
        self._sequences.abort(request_id, index)

    def hashes_of(self, request_id: str) -> list[bytes]:
        """Of the full blocks of a request of one sequence; none of others, or where it has just ended."""
        return self._sequences.hashes_of(request_id)

    def take_rejected(self) -> list[AddressedOutput]:
        """Answers to requests that turned out to be impossible."""
        rejected, self._sequences.rejected = self._sequences.rejected, []
        return rejected

    def stats(
        self,
        num_steps: int,
        last_step_time: float,
        *,
        steps_per_second: float = 0.0,
        prefill_tokens_per_second: float | None = None,
        step_tokens_counts: Collection[int] = (),
        step_tokens_sum: int = 0,
        num_kv_events: int = 0,
        transfers: TransferStats | None = None,
    ) -> SchedulerStats:
        """State now, with what only the loop knows of itself."""
        num_under_way = sum(step.num_prompt_tokens for step in self._under_way)
        return SchedulerStats(
            num_running=len(self._sequences.running),
            num_waiting=len(self._waiting) + self._sequences.num_future_forks,
            num_blocks_used=self._kv.pool.num_used,
            num_blocks=self._kv.pool.num_blocks,
            num_steps=num_steps,
            num_preemptions=self._sequences.num_preemptions,
            num_prefix_queries=self._kv.num_queries,
            num_prefix_hits=self._kv.num_hits,
            last_step_time=last_step_time,
            num_held=self._sequences.num_held,
            num_drafts=self._drafts.num_drafts,
            num_draft_tokens=self._drafts.num_draft_tokens,
            num_accepted_tokens=self._drafts.num_accepted_tokens,
            num_accepted_per_position=list(self._drafts.per_position),
            waiting_uncached_tokens=self._sequences.uncached.num_tokens,
            running_uncached_tokens=self._sequences.num_prefilling_tokens + num_under_way,
            kv_used_tokens=self._kv.num_used_tokens,
            kv_capacity_tokens=self._kv.num_tokens,
            steps_per_second=steps_per_second,
            prefill_tokens_per_second=prefill_tokens_per_second,
            step_tokens_counts=list(step_tokens_counts),
            step_tokens_sum=step_tokens_sum,
            num_kv_events=num_kv_events,
            transfers=transfers,
        )

    def reset_prefix_cache(self) -> None:
        """Nothing that is cached now is found again; sequences keep the blocks that they hold."""
        self._kv.forget_all()

    def knows(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return self._sequences.is_known(request_id)

    def all_requests(self) -> list[str]:
        """Those that have not ended."""
        return self._sequences.all_requests()

    def requests_of(self, api_index: int) -> list[str]:
        """Those of one API process that have not ended."""
        return self._sequences.requests_of(api_index)

    @property
    def num_free_rows(self) -> int:
        """Sequences that could run besides those that do and those for which rows are reserved."""
        return self._rows.num_free

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    def give_up(self, request_id: str, error: str) -> list[AddressedOutput]:
        """End a request with an error; unknown ones have ended."""
        return self._sequences.give_up(request_id, error)

    @property
    def last_step_under_way(self) -> int | None:
        return self._under_way[-1].plan.number if self._under_way else None

    def has_ended(self, step: int | None) -> bool:
        """Whether nothing touches what steps up to this one were to read or write; None: there was no such step."""
        return step is None or not self._under_way or self._under_way[0].plan.number > step

    def schedule(self, now: float | None = None) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute, or nothing before results are in. `now`: of the
        clock by which requests are told when they were first scheduled."""
        draft = self._planner.draft()
        if self._sequences.forking and draft.is_empty:
            draft = self._planner.draft()  # a prompt just admitted is cached whole, and its sequences fork first
        if draft.is_empty:
            self._give_up_what_never_fits()
            return None
        plan = draft.plan(next(self._step_numbers), self._rows.take_pending(), self._num_failures)
        rows = plan.rows.astype(np.int64)
        max_tokens_in_flight = plan.samples.astype(np.int64)
        max_tokens_in_flight[: plan.num_decodes] = draft.decode_lengths
        generations = self._rows.generation[rows]
        chunks = [self._rows.occupant(row) for row in draft.chunk_rows]
        for sequence in chunks:
            sequence.request.admitted_at = sequence.request.admitted_at or now
        self._under_way.append(
            StepUnderWay(
                plan, rows, generations, max_tokens_in_flight, draft.announced, chunks, sum(draft.chunk_lengths)
            )
        )
        self._waiting.served(self._rows.tenant[rows], plan.num_new_tokens)
        return plan

    def update(self, plan: StepPlan, result: StepResult, outcome: Outcome) -> None:
        """Take the results of a step, in the order in which steps were planned; what they come to joins the outcome."""
        step = self._under_way.popleft()
        assert plan is step.plan, "results come in the order of the plans"
        self._kv.wrote(step.announced)
        is_current = self._rows.generation[step.rows] == step.generations
        if self.remote.offers:
            self._note_written(plan, step.rows, is_current)
        self._take_prompts(step, result, is_current, outcome)
        if result.columns and result.strayed_rows:
            self._give_up_strayed(step.rows[is_current & np.isin(step.rows, result.strayed_rows)], outcome)
            is_current = self._rows.generation[step.rows] == step.generations
        self._take_tokens(step, result, is_current, outcome)
        if self._rows.num_that_wait:
            rows = step.rows[is_current & plan.samples]
            self._rows.is_awaited[rows] = False
            if result.drafts is not None:
                self._rows.keep_drafts(rows, result.drafts[is_current[plan.samples]])
            self._beams.take(result.candidates, rows.tolist(), outcome)

    def fail(self, plan: StepPlan, error: str, outcome: Outcome) -> None:
        """A step could not be computed, and none that was planned after it will be.

        Every request of the failed step ends. What the lost steps were to write can no longer be found, and all other
        running sequences wait to be computed again, since any of them may have built on it.
        """
        step = self._under_way[0]
        assert plan is step.plan, "steps fail in the order of the plans"
        self._num_failures += 1
        self._kv.withdraw(block for lost in self._under_way for block in lost.announced)
        self._under_way.clear()
        is_current = self._rows.generation[plan.rows] == step.generations
        hit = [self._rows.sequences[row] for row in plan.rows[is_current].tolist()]
        for request in dict.fromkeys(sequence.request for sequence in hit if sequence is not None):
            outcome.outputs += self._sequences.give_up(request.request_id, error)
        while self._sequences.running:
            self._sequences.wait_again(self._sequences.running[-1])
        self._rows.take_pending()

    def _give_up_strayed(self, rows: NDArray[np.int64], outcome: Outcome) -> None:
        for row in rows.tolist():
            sequence = self._rows.sequences[row]  # None where its request has just ended with another row
            if sequence is not None:
                outcome.outputs += self._sequences.give_up(sequence.request.request_id, STRAYED)

    def _give_up_what_never_fits(self) -> None:
        """Whoever comes first and can compute nothing, although no result is awaited, has preempted all others for it:
        a group, since a single sequence always fits."""
        sequences = self._sequences
        if sequences.running and not self._under_way and not sequences.forking and not self.remote.holds_pages:
            sequences.give_up_too_large(sequences.running[0].request)

    def _note_written(self, plan: StepPlan, rows: Rows, is_current: NDArray[np.bool_]) -> None:
        """Before any block is released: of a chunk all its tokens are written, of a decode those before it."""
        written = self._rows.num_written[rows]
        chunks = slice(plan.num_decodes, None)
        written[chunks] = plan.starts[chunks].astype(np.int64) + plan.num_new_tokens[chunks]
        self.remote.note_written(rows[is_current], written[is_current])

    def _take_prompts(
        self, step: StepUnderWay, result: StepResult, is_current: NDArray[np.bool_], outcome: Outcome
    ) -> None:
        """Chunks are written: keep their scores, which count for the whole request, release blocks behind windows, and
        end those that want no more than a vector."""
        plan = step.plan
        for index, sequence in enumerate(step.chunks, start=plan.num_decodes):
            row, start = int(plan.rows[index]), int(plan.starts[index])
            scored = result.prompt_logprobs.get(row) if result.columns else None
            if scored:
                sequence.request.gather_scores(start, scored)
            if is_current[index]:
                written = start + int(plan.num_new_tokens[index])
                self._rows.wrote_chunk(row, written)
                self._kv.free_behind(sequence.blocks, written)
                if result.columns and row in result.pooled:
                    outcome.outputs.append(self._pooled(sequence, result.pooled[row]))
                    self._sequences.end(sequence)

    def _pooled(self, sequence: Sequence, vector: bytes) -> AddressedOutput:
        request = sequence.request
        output = SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            new_token_ids=[],
            pooled=vector,
            num_cached_tokens=request.num_cached_tokens or 0,
            admitted_at=request.take_admission(),
            finish_reason="stop",
        )
        return AddressedOutput(request.api_index, output)

    def _take_tokens(
        self, step: StepUnderWay, result: StepResult, is_current: NDArray[np.bool_], outcome: Outcome
    ) -> None:
        """Append what was drawn, offer the blocks that it filled, end what has ended, and put the outputs together."""
        state = self._rows
        lines = where(is_current[step.plan.samples])  # of the result, whose rows have not changed hands
        sampled = where(step.plan.samples & is_current)
        drawn = DrawnTokens(
            step.rows[sampled], result.token_ids[lines], result.num_accepted[lines], step.max_tokens_in_flight[sampled]
        )
        if self._depth is not None:
            self._count_drafts(self._depth, drawn, result.num_drafts[lines])
        kept = state.keep(drawn)
        has_filled = state.num_written[drawn.rows] >= state.next_boundary[drawn.rows]
        if np.count_nonzero(has_filled):
            self._offer_written(drawn.rows[has_filled])
        has_ended = kept.has_ended
        is_plain = state.is_plain[drawn.rows] & ~has_ended
        outcome.plain = state.plain_tokens(kept, where(is_plain))
        for line in (~is_plain & (kept.num_kept > 0)).nonzero()[0].tolist():
            sequence = state.occupant(drawn.rows[line])
            output = self._output(sequence, kept, line, result)
            outcome.outputs.append(AddressedOutput(sequence.request.api_index, output))
            if has_ended[line]:
                self._sequences.end(sequence)

    def _offer_written(self, rows: Rows) -> None:
        state, kv = self._rows, self._kv
        boundaries = []
        for row, written in zip(rows.tolist(), state.num_written[rows].tolist(), strict=True):
            blocks = state.occupant(row).blocks
            kv.offer_written(state.token_ids[row], blocks, written)
            kv.free_behind(blocks, written)
            boundaries.append(blocks.next_boundary)
        state.next_boundary[rows] = boundaries

    def _output(self, sequence: Sequence, kept: KeptTokens, line: int, result: StepResult) -> SequenceOutput:
        request, row = sequence.request, sequence.row
        num_kept = int(kept.num_kept[line])
        tokens: list[int] = kept.drawn.token_ids[line, :num_kept].tolist()
        logprobs = result.logprobs.get(row) if result.columns else None
        is_first, sequence.has_sent_output = not sequence.has_sent_output, True
        reason: FinishReason | None = "stop" if kept.is_stop[line] else "length" if kept.is_full[line] else None
        self._rows.refresh(sequence)
        return SequenceOutput(
            request_id=request.request_id,
            index=sequence.index,
            new_token_ids=tokens,
            logprobs=None if logprobs is None else logprobs[:num_kept],
            prompt_logprobs=request.take_scores() if is_first else None,
            num_cached_tokens=request.num_cached_tokens or 0,
            admitted_at=request.take_admission(),
            finish_reason=reason,
            stop_token_id=tokens[-1] if reason == "stop" else None,
        )

    def _count_drafts(self, depth: DraftDepth, drawn: DrawnTokens, num_drafts: NDArray[np.int32]) -> None:
        num_asked = drawn.max_tokens_in_flight - 1
        if not num_asked.any():
            return
        num_accepted = np.maximum(drawn.num_accepted - 1, 0)
        depth.observe(drawn.rows, num_asked, num_accepted)
        counts = self._drafts
        counts.num_drafts += int(np.count_nonzero(num_drafts))
        counts.num_draft_tokens += int(num_drafts.sum())
        counts.num_accepted_tokens += int(num_accepted.sum())
        for position in range(int(num_accepted.max())):
            if position == len(counts.per_position):
                counts.per_position.append(0)
            counts.per_position[position] += int(np.count_nonzero(num_accepted > position))


def make_scheduler(
    limits: SchedulerLimits,
    *,
    policy: PolicyName,
    preemption_threshold: int = 0,
    num_blocks: int,
    block_size: int,
    groups: tuple[KvGroup, ...],
    enable_prefix_caching: bool,
    depth: DraftDepth | None = None,
    event_log: KvEventLog | None = None,
) -> Scheduler:
    """A scheduler over blocks of its own."""
    kv = KvCache(num_blocks, block_size, groups, enable_prefix_caching=enable_prefix_caching, event_log=event_log)
    return Scheduler(limits, kv, waiting_queue(policy, preemption_threshold), depth)
