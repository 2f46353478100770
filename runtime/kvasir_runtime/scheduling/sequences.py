"""The life cycle of requests and their sequences: held, waiting, running, forked, preempted, ended.

It is the one owner of which sequences there are, and in which state; `RunningRows` is the one owner of how far each
running one has come. It decides nothing about steps.
"""

import itertools
from bisect import insort
from operator import attrgetter

import msgspec
import numpy as np

from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.kv_cache.kept_blocks import KeptBlocks
from kvasir_runtime.kv_cache.kv_cache import KvCache, Prefix
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import AddressedOutput, SequenceOutput
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.request import Request, Sequence, Status, sequences_of
from kvasir_runtime.scheduling.running_rows import RunningRows
from kvasir_runtime.scheduling.step import DraftDepth, Fork, NewSequence, Rows, SchedulerLimits
from kvasir_runtime.scheduling.waiting import UncachedTokens, WaitingQueue

by_rank = attrgetter("rank")


class Sequences:
    def __init__(
        self, limits: SchedulerLimits, kv: KvCache, waiting: WaitingQueue, depth: DraftDepth | None = None
    ) -> None:
        self.rows = RunningRows(
            limits.max_num_seqs,
            limits.max_model_len,
            num_stages=limits.num_stages,
            max_drafts=0 if depth is None else depth.max_depth,
        )
        self.kv = kv
        self.kept = KeptBlocks(kv)
        self.waiting = waiting
        self.uncached = UncachedTokens(kv)
        self.running: list[Sequence] = []
        """By rank."""
        self.prefilling: list[Sequence] = []
        """Running ones whose prompts are not computed, by rank."""
        self.forking: list[Sequence] = []
        """Running ones from which others are to fork."""
        self.rejected: list[AddressedOutput] = []
        """Answers to requests that turned out to be impossible, to be taken by the loop."""
        self.num_future_forks = 0
        self.num_preemptions = 0
        self._max_num_seqs = limits.max_num_seqs
        self._depth = depth
        self._by_id: dict[str, Request] = {}
        self._held: dict[str, list[Sequence]] = {}
        self._numbers = itertools.count()
        self._rows_by_rank: Rows | None = None  # None: to be made anew

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._by_id)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def rows_by_rank(self) -> Rows:
        if self._rows_by_rank is None:
            self._rows_by_rank = np.array([sequence.row for sequence in self.running], dtype=np.int64)
        return self._rows_by_rank

    def all_requests(self) -> list[str]:
        return list(self._by_id)

    def requests_of(self, api_index: int) -> list[str]:
        return [request_id for request_id, request in self._by_id.items() if request.api_index == api_index]

    def is_known(self, request_id: str) -> bool:
        return request_id in self._by_id

    def is_running(self, request_id: str) -> bool:
        request = self._by_id.get(request_id)
        return request is not None and any(sequence.status is Status.RUNNING for sequence in request.sequences)

    def first_held(self, request_id: str) -> Sequence | None:
        """Of a held request, the sequence that computes the prompt; None where the request is not held (any more)."""
        return next(iter(self._held.get(request_id, ())), None)

    def hashes_of(self, request_id: str) -> list[bytes]:
        """Of the full blocks of a request of one sequence; none of others."""
        request = self._by_id.get(request_id)
        if request is None or request.group is not None or len(request.sequences) != 1:
            return []
        (sequence,) = request.sequences
        is_running = sequence.status is Status.RUNNING
        tokens = self.rows.known(sequence.row).tolist() if is_running else sequence.token_ids
        return self.kv.hashes_to_look_up(tokens, sequence.blocks)

    # Coming

    def add(self, request: Request, message: AddRequest, *, is_held: bool) -> None:
        request.number = next(self._numbers)
        request.tenant_number = self.waiting.arrive(request)
        self._by_id[request.request_id] = request
        if request.num_rows > self._max_num_seqs:
            self._reject_too_wide(request)
            return
        ready = self._begin(request, message)
        if is_held:
            self._held[request.request_id] = ready
            for sequence in ready:
                sequence.status = Status.HELD
        else:
            for sequence in ready:
                self._wait(sequence)

    def release(self, request_id: str) -> None:
        for sequence in self._held.pop(request_id, ()):
            self._wait(sequence)

    def _begin(self, request: Request, message: AddRequest) -> list[Sequence]:
        """The sequences that wait for their turn; those that share a prompt just begun fork from the first."""
        keys = request.spec.extra_keys
        if request.group is not None:
            return [self._first_member(request, list(request.spec.prompt_token_ids), self.kv.empty(keys))]
        sequences = sequences_of(request, message, [self.kv.empty(keys) for _ in message.sequences])
        for sequence in sequences:
            sequence.rank = self.waiting.rank(request, request.number, sequence.index)
        request.sequences = list(sequences)
        fresh = [sequence for sequence in sequences if not sequence.has_sent_output]
        for child in fresh[1:]:
            child.status = Status.HELD
        if fresh:
            fresh[0].future_forks = fresh[1:]
            self.num_future_forks += len(fresh[1:])
        return [sequence for sequence in sequences if sequence not in fresh[1:]]

    def _first_member(self, request: Request, token_ids: list[int], blocks: SequenceBlocks) -> Sequence:
        """Of a group: the sequence that computes the prompt."""
        assert request.group is not None
        sequence = self.new_member(request, request.spec.sampling, token_ids, blocks)
        request.sequences = [sequence]
        return sequence

    def new_member(
        self, request: Request, sampling: SamplingParams, token_ids: list[int], blocks: SequenceBlocks
    ) -> Sequence:
        """Of a group: another sequence, which neither waits nor runs yet."""
        group = request.group
        assert group is not None
        sequence = Sequence(request, group.num_sequences, sampling, token_ids, blocks, has_sent_output=False)
        sequence.rank = self.waiting.rank(request, request.number, sequence.index)
        group.num_sequences += 1
        return sequence

    # Waiting

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.waiting.push(sequence)
        self.uncached.add(sequence)

    def _stop_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.uncached.remove(sequence)

    def _wait_apart(self, child: Sequence, parent: Sequence) -> None:
        """Let a child wait for itself. It knows the same tokens as its parent, so none is hashed again."""
        child.blocks.hashes = list(parent.blocks.hashes)
        self._wait(child)

    # Running

    @property
    def have_prompts(self) -> bool:
        """Whether any is to be computed, or waits for that."""
        return bool(self.prefilling) or len(self.waiting) > 0

    @property
    def num_prefilling_tokens(self) -> int:
        """Of prompts partly planned, those that no step computes yet."""
        known, planned = self.rows.num_known, self.rows.most_planned
        return sum(each.num_to_compute(int(known[each.row])) - int(planned[each.row]) for each in self.prefilling)

    def admit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let a waiting sequence run from its cached prefix. The caller has made sure of rows and pages."""
        request, token_ids = sequence.request, sequence.token_ids
        self._stop_waiting(sequence)
        is_first_lookup = not (sequence.was_admitted or request.recomputes_prompt)
        writes = self.kv.adopt(sequence.blocks, prefix, len(token_ids) if is_first_lookup else 0)
        if request.request_id in self.kept.arrived:
            self.kept.release(request.request_id)
        sequence.was_admitted = True
        if request.num_cached_tokens is None:
            request.num_cached_tokens = prefix.num_tokens
        self._start(sequence, token_ids, prefix.num_tokens, self.rows.take_row())
        if request.group is not None:
            request.group.spare_rows = [self.rows.take_row() for _ in range(request.num_rows - 1)]
        self.rows.pending.added.append(self._as_new(sequence, prefix.num_tokens))
        self.rows.pending.write_tables(sequence.row, writes)
        if sequence.num_to_compute(len(token_ids)) > prefix.num_tokens:  # else cached up to where others fork
            insort(self.prefilling, sequence, key=by_rank)

    def _as_new(self, sequence: Sequence, num_computed: int) -> NewSequence:
        request, sampling = sequence.request, sequence.sampling
        if not request.lacks_prompt_logprobs:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return NewSequence(
            sequence.row,
            request.spec.with_sampling(sampling),
            sequence.token_ids[request.num_prompt_tokens :],
            num_computed,
            num_candidates=0 if request.group is None else request.group.num_candidates,
        )

    def _start(self, sequence: Sequence, token_ids: "list[int] | np.ndarray", num_computed: int, row: int) -> None:
        self.rows.occupy(row, sequence, token_ids, num_computed)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=by_rank)
        self._rows_by_rank = None
        if sequence.future_forks:
            self.forking.append(sequence)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for `num_tokens` tokens. The caller has made sure that the pages are free."""
        has_grown = self.try_grow(sequence, num_tokens)
        assert has_grown, f"no pages for {num_tokens} tokens of row {sequence.row}"

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """The same where the pages are free; whether they were, else nothing has changed."""
        row, blocks = sequence.row, sequence.blocks
        writes = self.kv.grow(blocks, num_tokens)
        if writes is None:
            return False
        self.rows.pending.write_tables(row, writes)
        self.rows.capacity[row] = blocks.capacity
        return True

    # Forking

    def fork_ready(self) -> None:
        """Make the forks of prompts that are computed, or whose last step is under way."""
        for parent in list(self.forking):
            if self.rows.most_planned[parent.row] >= parent.num_fork_tokens:
                self._fork_all(parent)

    def _fork_all(self, parent: Sequence) -> None:
        """Those for which there is no row or no page wait, to be computed from the prompt's tokens."""
        children, num_tokens = parent.future_forks, parent.num_fork_tokens
        num_pages = self.kv.fork_pages(num_tokens)
        num_fitting = min(len(children), self.rows.num_free)
        if num_pages:
            num_fitting = min(num_fitting, self.kv.pool.num_free // num_pages)
        self.fork(parent, {child: self.rows.take_row() for child in children[:num_fitting]}, num_tokens)
        for child in children[num_fitting:]:
            self._wait_apart(child, parent)
        self.num_future_forks -= len(children)
        parent.future_forks = []
        self.forking.remove(parent)

    def fork(self, parent: Sequence, children: dict[Sequence, int], num_tokens: int) -> None:
        """Let the children run, each in a row that was taken for it, from the parent's first `num_tokens` computed
        tokens and those known after them."""
        pending = self.rows.pending
        parents_writes = pending.table_writes_of(parent.row, num_tokens // self.kv.block_size)
        for child, row in children.items():
            child.blocks, writes, copies = self.kv.fork(parent.blocks, num_tokens)
            child.was_admitted = True
            self._start(child, self.rows.known(parent.row), num_tokens, row)
            sampling = msgspec.structs.replace(child.sampling, prompt_logprobs=None)
            pending.forks.append(Fork(parent.row, row, sampling))
            pending.write_tables(row, [*parents_writes, *writes])
            pending.copy_blocks(row, copies)

    # Preempting

    def free_pages(self, sequence: Sequence, num_pages: int) -> bool:
        """Preempt those behind the sequence until so many pages are free; False: it has to wait.

        It is never preempted itself, nor is its group. A sequence that waits keeps its blocks: those before it go on
        and end, or preempt it.
        """
        self.give_up_kept(num_pages)
        while num_pages > self.kv.pool.num_free:
            victim = self.running[-1]
            if victim is sequence or (victim.request is sequence.request and victim.request.group is not None):
                return False
            self.preempt(victim)
            self.give_up_kept(num_pages)  # what it kept for other engines is among that now
        return True

    def give_up_kept(self, num_pages: int) -> None:
        """Until so many pages are free, or nothing is kept any more for those that wait."""
        while num_pages > self.kv.pool.num_free and self.give_up_one_kept():
            pass

    def give_up_one_kept(self, keep: str | None = None) -> bool:
        return self.kept.give_up_one(keep, self.is_running)

    def preempt(self, sequence: Sequence) -> None:
        """For want of pages, or of a row."""
        self.num_preemptions += 1
        self.wait_again(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Let a running sequence wait to be computed again from its known tokens; a group from its prompt."""
        if sequence.request.group is not None:
            self._wait(self._restart_group(sequence.request))
            return
        sequence.token_ids = self.rows.known(sequence.row).tolist()
        self.stop(sequence)
        self._wait(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and row away. Forks that the ranks have not made of it yet they never can:
        these wait again too."""
        row = sequence.row
        children = [self.rows.occupant(target) for target in self.rows.pending.forks_from(row)]
        sequence.status = Status.FINISHED  # unless it waits again
        self.running.remove(sequence)
        self._rows_by_rank = None
        for some in (self.prefilling, self.forking):
            if sequence in some:
                some.remove(sequence)
        self.kv.release(sequence.blocks)
        self.rows.vacate(row)
        if self._depth is not None:
            self._depth.forget(row)
        for child in children:
            if child.request.group is None:  # a group stops together
                self.wait_again(child)

    def _restart_group(self, request: Request) -> Sequence:
        """Take all rows away and begin again from the prompt, which comes to the same tokens."""
        group = request.group
        assert group is not None
        first = request.sequences[0]
        token_ids = self.rows.known(first.row)[: request.num_prompt_tokens].tolist()
        blocks = self.kv.empty(first.blocks.extra_keys)
        for sequence in request.sequences:
            self.stop(sequence)
        self.rows.give_back(group.spare_rows)
        group.restart()
        restarted = self._first_member(request, token_ids, blocks)
        restarted.was_admitted = True
        return restarted

    # Ending

    def abort(self, request_id: str, index: int | None) -> None:
        request = self._by_id.get(request_id)
        if request is None or (request.group is not None and index is not None):
            return
        for sequence in reversed(request.sequences[:]):  # children before their parent, whose place none takes then
            if index in (None, sequence.index):
                self.end(sequence)

    def give_up(self, request_id: str, error: str, *, is_too_large: bool = False) -> list[AddressedOutput]:
        """End a request with an error for each of its sequences; unknown ones have ended."""
        request = self._by_id.get(request_id)
        if request is None:
            return []
        group = request.group
        indices = group.indices if group is not None else [sequence.index for sequence in request.sequences]
        for sequence in reversed(request.sequences[:]):  # as above
            self.end(sequence)
        outputs = [
            SequenceOutput(
                request_id=request.request_id,
                index=index,
                new_token_ids=[],
                finish_reason="error",
                error=error,
                is_too_large=is_too_large,
            )
            for index in indices
        ]
        return [AddressedOutput(request.api_index, output) for output in outputs]

    def give_up_too_large(self, request: Request) -> None:
        """It has everything to itself, and does not fit."""
        kv, num_output_tokens = self.kv, request.max_total_tokens - request.num_prompt_tokens
        error = (
            f"{request.description} over a prompt of {request.num_prompt_tokens} tokens, with up to "
            f"{num_output_tokens} more, outgrew the KV cache of {kv.pool.num_blocks} blocks of {kv.block_size} tokens: "
            "ask for fewer tokens or sequences, or give the cache more with --kv-cache-memory-bytes"
        )
        self.rejected += self.give_up(request.request_id, error, is_too_large=True)

    def _reject_too_wide(self, request: Request) -> None:
        error = f"{request.description} needs {request.num_rows} rows, but --max-num-seqs is {self._max_num_seqs}"
        self.rejected += self.give_up(request.request_id, error, is_too_large=True)
        self._end_request(request)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, and its request with the last one."""
        request = sequence.request
        match sequence.status:
            case Status.RUNNING:
                self.stop(sequence)
            case Status.WAITING:
                self._stop_waiting(sequence)
            case Status.HELD:
                self._drop_held(sequence)
        sequence.status = Status.FINISHED
        request.sequences.remove(sequence)
        if sequence.future_forks:
            self._pass_on_forks(sequence)
        if not request.sequences:
            self._end_request(request)

    def _drop_held(self, sequence: Sequence) -> None:
        for sibling in sequence.request.sequences:
            if sequence in sibling.future_forks:
                sibling.future_forks.remove(sequence)
                self.num_future_forks -= 1
        held = self._held.get(sequence.request.request_id, [])
        if sequence in held:
            held.remove(sequence)

    def _pass_on_forks(self, parent: Sequence) -> None:
        """The first child of a sequence that ended before its prompt was computed takes its place."""
        first, *rest = parent.future_forks
        parent.future_forks, first.future_forks = [], rest
        self.num_future_forks -= 1
        held = self._held.get(first.request.request_id)
        if held is None:
            self._wait_apart(first, parent)
        else:
            held.append(first)

    def _end_request(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        if request.request_id in self.kept.arrived:
            self.kept.release(request.request_id)
        if request.group is not None:
            self.rows.give_back(request.group.spare_rows)
        del self._by_id[request.request_id]
        self.waiting.leave(request)
