"""The requests that have not ended: how they come, are held, preempted, forked and given up, and how they leave."""

import itertools

from kvasir_runtime.kv_cache.landed_blocks import LandedBlocks
from kvasir_runtime.kv_cache.sequence_blocks import SequenceBlocks
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.outputs import SequenceOutput
from kvasir_runtime.requests.sampling_params import SamplingParams
from kvasir_runtime.scheduling.beams import BeamGroup, new_state
from kvasir_runtime.scheduling.limits import SchedulerLimits
from kvasir_runtime.scheduling.policies import WaitingQueue
from kvasir_runtime.scheduling.request import Request, Sequence, Status, request_from, sequences_of
from kvasir_runtime.scheduling.running_set import RunningSet
from kvasir_runtime.scheduling.update import AddressedOutput


class Requests:
    def __init__(self, limits: SchedulerLimits, waiting: WaitingQueue, running: RunningSet) -> None:
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._kv = running.kv
        self.landed = LandedBlocks(running.kv)
        self._by_id: dict[str, Request] = {}
        self._held: dict[str, list[Sequence]] = {}
        self._numbers = itertools.count()
        self.beams: dict[str, BeamGroup] = {}
        self.rejected: list[AddressedOutput] = []
        """Answers to requests that turned out to be impossible, to be taken by the loop."""
        self.num_heirs = 0
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._by_id

    def first_held(self, request_id: str) -> Sequence | None:
        """Of a held request, the sequence that computes the prompt; None where the request is not held (any more)."""
        return next(iter(self._held.get(request_id, ())), None)

    def add(self, message: AddRequest, *, is_held: bool) -> None:
        request = request_from(message, max_model_len=self._limits.max_model_len)
        request.number = next(self._numbers)
        request.tenant_number = self._waiting.arrive(request)
        self._by_id[request.request_id] = request
        ready = self._begin_beams(request, message) if request.spec.beam else self._begin_sequences(request, message)
        if is_held and ready:  # an impossible request is answered at once and waits for nothing
            self._held[request.request_id] = ready
            for sequence in ready:
                sequence.status = Status.HELD
        else:
            for sequence in ready:
                self._waiting.push(sequence)

    def release(self, request_id: str) -> None:
        for sequence in self._held.pop(request_id, ()):
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting.push(sequence)

    def _wait_after(self, parent: Sequence, heir: Sequence) -> None:
        """Let an heir wait for itself. It knows the same tokens as its parent, so none is hashed again."""
        heir.blocks.hashes = list(parent.blocks.hashes)
        self._wait(heir)

    def _begin_sequences(self, request: Request, message: AddRequest) -> list[Sequence]:
        """The sequences that wait for their turn; those that share a prompt just begun fork from the first."""
        sequences = sequences_of(request, message, [self._empty_blocks(message) for _ in message.sequences])
        for sequence in sequences:
            sequence.rank = self._waiting.rank(request, request.number, sequence.index)
        request.sequences = list(sequences)
        fresh = [sequence for sequence in sequences if not sequence.has_sent_output]
        for heir in fresh[1:]:
            heir.status = Status.HELD
        if fresh:
            fresh[0].heirs = fresh[1:]
            self.num_heirs += len(fresh[1:])
        return [sequence for sequence in sequences if sequence not in fresh[1:]]

    def _begin_beams(self, request: Request, message: AddRequest) -> list[Sequence]:
        """The one sequence that computes the prompt."""
        group = BeamGroup(request, [start.index for start in message.sequences], new_state(request))
        self.beams[request.request_id] = group
        width, limit = group.state.params.width, self._limits.max_num_seqs
        if width > limit:
            error = f"a beam search of width {width} needs as many rows, but --max-num-seqs is {limit}"
            self.rejected += self.give_up(request, error)
            self._end_request(request)
            return []
        return [self._first_beam(group, list(message.spec.prompt_token_ids), self._empty_blocks(message))]

    def _first_beam(self, group: BeamGroup, token_ids: list[int], blocks: SequenceBlocks) -> Sequence:
        sequence = self.new_beam(group, group.request.spec.sampling, token_ids, blocks)
        group.request.sequences = [sequence]
        group.sequences = [sequence]
        return sequence

    def new_beam(
        self, group: BeamGroup, sampling: SamplingParams, token_ids: list[int], blocks: SequenceBlocks
    ) -> Sequence:
        request = group.request
        sequence = Sequence(request, group.num_sequences, sampling, token_ids, blocks, has_sent_output=False)
        sequence.rank = self._waiting.rank(request, request.number, sequence.index)
        group.num_sequences += 1
        return sequence

    def _empty_blocks(self, message: AddRequest) -> SequenceBlocks:
        return self._kv.empty(message.spec.extra_keys)

    def fork_heirs(self, parent: Sequence) -> None:
        """Once the prompt is computed, or its last step under way, let the heirs go their own ways.

        Heirs for which there is no row or no page wait, to be computed from the prompt's tokens.
        """
        rows, kv, num_tokens = self._running.rows, self._kv, parent.num_fork_tokens
        if rows.most_planned[parent.row] < num_tokens:
            return
        untold = self._running.untold_writes(parent, num_tokens)
        for heir in parent.heirs:
            if rows.num_free and kv.fork_pages(num_tokens) <= kv.pool.num_free:
                self._running.fork(parent, heir, num_tokens, rows.take_row(), untold)
            else:
                self._wait_after(parent, heir)
        self.num_heirs -= len(parent.heirs)
        parent.heirs = []
        self._running.parents.remove(parent)

    def free_pages(self, sequence: Sequence, num_pages: int) -> bool:
        """Preempt those behind the sequence until so many pages are free; False: it has to wait.

        It is never preempted itself, nor are beams of its own search. A sequence that waits keeps its blocks: those
        before it go on and end, or preempt it.
        """
        self.give_up_landed(num_pages)
        while num_pages > self._kv.pool.num_free:
            victim = self._running.sequences[-1]
            if victim is sequence or (victim.request is sequence.request and victim.request.spec.beam is not None):
                return False
            self.preempt(victim)
            self.give_up_landed(num_pages)  # what it kept for other engines is among that now
        return True

    def give_up_landed(self, num_pages: int) -> None:
        """Until so many pages are free, or nothing is held any more for those that wait."""
        while num_pages > self._kv.pool.num_free and self.landed.give_up_one():
            pass

    def preempt(self, sequence: Sequence) -> None:
        """For want of pages."""
        self.num_preemptions += 1
        self.wait_again(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Let a running sequence wait to be computed again from its known tokens; a beam search from its prompt."""
        group = self.beams.get(sequence.request.request_id)
        if group is not None:
            self._wait(self._restart_beams(group))
            return
        sequence.token_ids = self._running.rows.known(sequence.row).tolist()
        self._stop(sequence)
        self._wait(sequence)

    def _stop(self, sequence: Sequence) -> None:
        for orphan in self._running.stop(sequence):
            if orphan.request.spec.beam is None:  # beams of a search stop together
                self.wait_again(orphan)

    def _restart_beams(self, group: BeamGroup) -> Sequence:
        """Take all rows away and begin again from the prompt, which comes to the same beams."""
        first = group.sequences[0]
        token_ids = self._running.rows.known(first.row)[: group.request.num_prompt_tokens].tolist()
        blocks = self._kv.empty(first.blocks.extra_keys)
        for sequence in group.sequences:
            self._stop(sequence)
        self._running.rows.give_back(group.spare_rows)
        group.restart()
        restarted = self._first_beam(group, token_ids, blocks)
        restarted.was_admitted = True
        return restarted

    def hashes_of(self, request_id: str) -> list[bytes]:
        """Of the full blocks of a request of one sequence; none of others."""
        request = self._by_id.get(request_id)
        if request is None or request.spec.beam is not None or len(request.sequences) != 1:
            return []
        (sequence,) = request.sequences
        is_running = sequence.status is Status.RUNNING
        tokens = self._running.rows.known(sequence.row).tolist() if is_running else sequence.token_ids
        return self._kv.hashes_to_look_up(tokens, sequence.blocks)

    def abort(self, request_id: str, index: int | None) -> None:
        request = self._by_id.get(request_id)
        if request is None or (request.spec.beam is not None and index is not None):
            return
        for sequence in reversed(request.sequences[:]):  # heirs before their parent, whose place none has to take then
            if index in (None, sequence.index):
                self.end(sequence)

    def give_up_by_id(self, request_id: str, error: str) -> list[AddressedOutput]:
        request = self._by_id.get(request_id)
        return [] if request is None else self.give_up(request, error)

    def give_up(self, request: Request, error: str) -> list[AddressedOutput]:
        """End a request with an error for each of its sequences."""
        group = self.beams.get(request.request_id)
        indices = group.indices if group is not None else [sequence.index for sequence in request.sequences]
        for sequence in reversed(request.sequences[:]):  # as above
            self.end(sequence)
        return [
            AddressedOutput(
                request.api_index,
                SequenceOutput(
                    request_id=request.request_id, index=index, new_token_ids=[], finish_reason="error", error=error
                ),
            )
            for index in indices
        ]

    def give_up_outgrown(self, request: Request) -> None:
        """It has everything to itself, and does not fit."""
        what, ask_for = "the request", "tokens"
        if request.spec.beam is not None:
            what, ask_for = f"the beam search of width {request.spec.beam.width}", "beams or tokens"
        error = (
            f"{what} outgrew the KV cache of {self._kv.pool.num_blocks} blocks: ask for fewer {ask_for}, or give the "
            "cache more with --kv-cache-memory-bytes"
        )
        self.rejected += self.give_up(request, error)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence, and its request with the last one."""
        request = sequence.request
        match sequence.status:
            case Status.RUNNING:
                self._stop(sequence)
            case Status.WAITING:
                self._waiting.remove(sequence)
            case Status.HELD:
                self._let_go_of_held(sequence)
        sequence.status = Status.FINISHED
        request.sequences.remove(sequence)
        if sequence.heirs:
            self._bequeath(sequence)
        if not request.sequences:
            self._end_request(request)

    def _let_go_of_held(self, sequence: Sequence) -> None:
        for sibling in sequence.request.sequences:
            if sequence in sibling.heirs:
                sibling.heirs.remove(sequence)
                self.num_heirs -= 1
        held = self._held.get(sequence.request.request_id, [])
        if sequence in held:
            held.remove(sequence)

    def _bequeath(self, sequence: Sequence) -> None:
        """The first heir of a sequence that ended before its prompt was computed takes its place."""
        first, *rest = sequence.heirs
        sequence.heirs, first.heirs = [], rest
        self.num_heirs -= 1
        held = self._held.get(first.request.request_id)
        if held is None:
            self._wait_after(sequence, first)
        else:
            held.append(first)

    def _end_request(self, request: Request) -> None:
        self._held.pop(request.request_id, None)
        self.landed.let_go(request.request_id)
        group = self.beams.pop(request.request_id, None)
        if group is not None:
            self._running.rows.give_back(group.spare_rows)
        del self._by_id[request.request_id]
        self._waiting.leave(request)
