"""Decides what each step computes: which requests, how many tokens of each, and in which blocks.

One token budget per step. Running requests come first, then waiting ones as long as budget and blocks last; when blocks
run out the running request of the highest rank is preempted and computed again later. The scheduler reads no clock and
touches no device; `schedule` plans a step and `update` takes its results, possibly one step later.
"""

import itertools
from dataclasses import dataclass, field

from kvasir_runtime.engine.messages import FinishReason, RequestOutput, SchedulerStats, TokenLogprobs
from kvasir_runtime.kv_cache.block_pool import BlockPool
from kvasir_runtime.kv_cache.prefix_cache import PrefixCache
from kvasir_runtime.scheduling.batch import BatchOutput, NewRequest, ScheduledBatch, ScheduledRequest
from kvasir_runtime.scheduling.policies import PolicyName, WaitingQueue, waiting_queue
from kvasir_runtime.scheduling.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    """Requests in one step."""
    max_num_batched_tokens: int
    """Token budget of one step."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be spread over steps."""


@dataclass(frozen=True, slots=True)
class AddressedOutput:
    """An output and the API process that it goes to."""

    api_index: int
    output: RequestOutput


class Scheduler:
    def __init__(
        self, limits: SchedulerLimits, pool: BlockPool, prefix_cache: PrefixCache, waiting: WaitingQueue
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._waiting = waiting
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._released: list[str] = []
        self._numbers = itertools.count()
        self.num_preemptions = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        request.number = next(self._numbers)
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Forget a request at once; unknown ids are ones that have just finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step; None when there is nothing to compute."""
        plan = _Plan(self._limits.max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        self._schedule_running(plan)
        if self.num_preemptions == num_preemptions:
            self._admit_waiting(plan)
        return self._batch_of(plan) if plan.requests else None

    def update(self, batch: ScheduledBatch, output: BatchOutput) -> list[AddressedOutput]:
        """Take the results of a step, in the order in which steps were planned."""
        sampled = zip(output.token_ids, output.logprobs, strict=True)
        outputs: list[AddressedOutput] = []
        for share in batch.requests:
            token = next(sampled) if share.samples else None
            request = self._requests.get(share.request_id)
            if request is None:
                continue  # finished or aborted while the step ran
            _gather_prompt_logprobs(request, share, output.prompt_logprobs.get(share.request_id))
            if token is not None:
                outputs.append(self._append(request, *token))
        return outputs

    def fail(self, batch: ScheduledBatch, error: str) -> list[AddressedOutput]:
        """End every request of a step that could not be computed."""
        outputs: list[AddressedOutput] = []
        for share in batch.requests:
            if (request := self._requests.get(share.request_id)) is not None:
                self._finish(request)
                output = RequestOutput(
                    request_id=request.request_id, new_token_ids=[], finish_reason="error", error=error
                )
                outputs.append(AddressedOutput(request.api_index, output))
        return outputs

    def stats(self, num_steps: int, last_step_time: float) -> SchedulerStats:
        """State now, with the loop's own two figures."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_used=self._pool.num_used,
            num_blocks=self._pool.num_blocks,
            num_steps=num_steps,
            num_preemptions=self.num_preemptions,
            num_prefix_queries=self._prefix_cache.num_queries,
            num_prefix_hits=self._prefix_cache.num_hits,
            last_step_time=last_step_time,
        )

    def _schedule_running(self, plan: "_Plan") -> None:
        for request in sorted(self._running, key=self._waiting.rank):
            num_new = min(request.num_uncomputed_tokens, plan.budget)
            if num_new == 0 or request.status is not RequestStatus.RUNNING:
                continue
            if self._make_room(request, request.num_computed_tokens + num_new):
                self._take(plan, request, num_new)

    def _admit_waiting(self, plan: "_Plan") -> None:
        while plan.budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting.peek()
            if request is None or not self._admit(plan, request):
                return

    def _admit(self, plan: "_Plan", request: Request) -> bool:
        """Move a waiting request into the step, if blocks for all of its known tokens are to be had."""
        if request.num_in_flight:
            return False  # preempted with a token still under way, known in a moment
        table = request.table
        cached = [] if request.needs_prompt_logits else self._prefix_cache.match(request.token_ids, table)
        num_cached_tokens = len(cached) * table.block_size
        num_new = request.num_tokens - num_cached_tokens
        if num_new > plan.budget and not self._limits.enable_chunked_prefill:
            return False
        num_revived = sum(block.num_references == 0 for block in cached)
        if table.num_missing(request.num_tokens) - len(cached) > self._pool.num_free - num_revived:
            return False
        self._pool.share(cached)
        table.blocks.extend(cached)
        table.num_stored = len(cached)
        request.num_computed_tokens = num_cached_tokens
        self._prefix_cache.count(request.num_tokens, num_cached_tokens)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        self._waiting.remove(request)
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        plan.new_requests.append(_new_request(request))
        num_new = min(num_new, plan.budget)
        table.blocks.extend(self._pool.allocate(table.num_missing(num_cached_tokens + num_new)))
        self._take(plan, request, num_new)
        return True

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Give the request blocks for `num_tokens` tokens, preempting others or, last of all, itself."""
        num_missing = request.table.num_missing(num_tokens)
        while num_missing > self._pool.num_free:
            victim = max(self._running, key=self._waiting.rank)
            self._preempt(victim)
            if victim is request:
                return False
        request.table.blocks.extend(self._pool.allocate(num_missing))
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks away; it waits to be computed again from its known tokens."""
        self._running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        if not request.has_sent_output:
            request.prompt_logprobs.clear()
        request.status = RequestStatus.WAITING
        self._waiting.push(request)
        self.num_preemptions += 1

    def _take(self, plan: "_Plan", request: Request, num_new: int) -> None:
        first = request.num_computed_tokens
        request.num_computed_tokens += num_new
        samples = request.num_computed_tokens == request.num_tokens_ahead
        request.num_in_flight += samples
        plan.budget -= num_new
        plan.requests.append(ScheduledRequest(request.request_id, first, num_new, request.table.take_unsent(), samples))
        self._prefix_cache.store(request.token_ids, request.num_computed_tokens, request.table)
        self._waiting.served(request, num_new)

    def _batch_of(self, plan: "_Plan") -> ScheduledBatch:
        released, self._released = tuple(self._released), []
        num_tokens = self._limits.max_num_batched_tokens - plan.budget
        return ScheduledBatch(released, tuple(plan.new_requests), tuple(plan.requests), num_tokens)

    def _append(self, request: Request, token_id: int, logprobs: TokenLogprobs | None) -> AddressedOutput:
        request.token_ids.append(token_id)
        request.num_in_flight -= 1
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.needs_prompt_logits:
            prompt_logprobs = [None, *request.prompt_logprobs]
        finish_reason = _finish_reason(request, token_id)
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            finish_reason=finish_reason,
            stop_token_id=token_id if finish_reason == "stop" else None,
        )
        request.has_sent_output = True
        if request.status is RequestStatus.RUNNING:
            self._prefix_cache.store(request.token_ids, request.num_computed_tokens, request.table)
        if finish_reason is not None:
            self._finish(request)
        return AddressedOutput(request.api_index, output)

    def _finish(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._pool.release(request.table.take_all())
        self._released.append(request.request_id)


def make_scheduler(
    limits: SchedulerLimits, *, policy: PolicyName, num_blocks: int, enable_prefix_caching: bool
) -> Scheduler:
    """A scheduler over blocks of its own."""
    pool = BlockPool(num_blocks)
    return Scheduler(limits, pool, PrefixCache(pool, enabled=enable_prefix_caching), waiting_queue(policy))


@dataclass(slots=True)
class _Plan:
    """A step being put together."""

    budget: int
    new_requests: list[NewRequest] = field(default_factory=list)
    requests: list[ScheduledRequest] = field(default_factory=list)


def _new_request(request: Request) -> NewRequest:
    return NewRequest(request.request_id, list(request.token_ids), request.num_prompt_tokens, request.sampling)


def _gather_prompt_logprobs(request: Request, share: ScheduledRequest, entries: list[TokenLogprobs] | None) -> None:
    """Keep the scores of a prompt chunk, unless a preemption since then has made them come twice."""
    if entries and len(request.prompt_logprobs) == share.num_computed_tokens:
        request.prompt_logprobs.extend(entries)


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    if token_id in request.sampling.stop_token_ids and request.num_output_tokens > request.sampling.min_tokens:
        return "stop"
    if request.num_tokens >= request.max_total_tokens:
        return "length"
    return None
