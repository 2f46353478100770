"""The engine as an API process sees it: hand in a prompt, get text and tokens as they come.

It owns what is under way in this process, on one engine core or (data parallelism) several. A generation that is left
before its end is aborted in its cores, a core that dies fails every generation, and so does a defect in here;
`is_stalled` tells a hung core from an idle one.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec

from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.cores import CoreClient, Dispatcher, total_ready, total_stats
from kvasir_runtime.engine.detokenizer import Detokenizer, TextOptions
from kvasir_runtime.engine.generation import ActiveRequest, ActiveSequence, Generation, SequenceDelta
from kvasir_runtime.engine.messages import (
    Abort,
    AbortRequests,
    Asleep,
    EndRequests,
    EngineFailed,
    EngineReady,
    FromCore,
    MoveRequests,
    RequestsEnd,
    RequestsMove,
    ResetPrefixCache,
    Sleep,
    StepOutputs,
    ToCore,
    WakeUp,
)
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import (
    EngineAsleepError,
    EngineDeadError,
    InvalidRequestError,
    KvasirRuntimeError,
    RequestFailedError,
    RequestMovedError,
    RequestTooLargeError,
    ServerUnavailableError,
)
from kvasir_runtime.request_metrics import RequestMetrics
from kvasir_runtime.requests.add_request import AddRequest, RequestSpec, SequenceStart
from kvasir_runtime.requests.outputs import FinishReason, PlainTokens, SequenceOutput
from kvasir_runtime.requests.stats import SchedulerStats

logger = logging.getLogger(__name__)

_NOTHING: Mapping[int, SequenceDelta] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and how it is continued, in `n` sequences that are handed out."""

    request_id: str
    """Shown in logs; need not be unique."""
    spec: RequestSpec
    text: TextOptions
    n: int = 1
    arrival_time: float | None = None
    """Seconds since the epoch; None: now. It decides on the request's place among those that wait."""


class AsyncEngine:
    """One per API process, on its event loop. `run` must be running for anything to arrive."""

    def __init__(
        self,
        channels: Sequence[EngineChannel],
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        *,
        api_index: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`channels`: one to each core."""
        self._cores = [CoreClient(channel, last_progress=clock()) for channel in channels]
        self._clock = clock
        self._dispatcher = Dispatcher(self._cores)
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._api_index = api_index
        self._counter = itertools.count()
        self.dead: EngineDeadError | None = None
        self.ready: EngineReady | None = None
        """What the cores have together; None until all are ready."""
        self._num_handed_over = 0
        self._has_news = asyncio.Event()

    async def run(self) -> None:
        """Hand out what the cores send until one has died. Cancel it to stop listening."""
        listeners = [asyncio.create_task(self._listen(core)) for core in self._cores]
        try:
            await asyncio.wait(listeners, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)

    async def _listen(self, core: CoreClient) -> None:
        try:
            while self.dead is None:
                for message in await core.channel.receive():
                    self._handle(core, message)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the engine's outputs cannot be handed out any more")
            self._die(EngineDeadError(f"this server has a defect, its log has the details: {error!r}"))

    @property
    def stats(self) -> SchedulerStats | None:
        """Of all cores; None before the first is ready."""
        stats = self.stats_by_core
        return total_stats(stats) if stats else None

    @property
    def stats_by_core(self) -> list[SchedulerStats]:
        """Of those that have said anything."""
        return [core.stats for core in self._cores if core.stats is not None]

    def is_stalled(self, stall_seconds: float) -> bool:
        """Work of this process is pending on a core that for so long has finished no step."""
        now = self._clock()
        return any(core.has_work and now - core.last_progress > stall_seconds for core in self._cores)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        so_far: Mapping[int, SequenceDelta] = _NOTHING,
        http_request_id: str | None = None,
    ) -> Generation:
        """Starts at once; the sequences are numbered through all requests, `n` of the first one first.

        `so_far`: what other engines have made of some of them; only what follows is generated, and the text that is out
        already is filled in here. `http_request_id`: told to routers once, with the first request that is left. Raises
        EngineDeadError, ServerUnavailableError before the core is ready, and InvalidRequestError where nothing can
        follow.
        """
        if self.dead is not None:
            raise self.dead
        self.check_awake()
        if self.ready is None:
            raise ServerUnavailableError("the model is still loading; wait until /ready answers 200")
        arrival = self._clock()
        added: list[tuple[AddRequest, dict[int, ActiveSequence]]] = []
        first = 0
        for request in requests:
            added.append(self._added(request, first, so_far))
            first += request.n
        indices = [sequence.delta_index for _, sequences in added for sequence in sequences.values()]
        generation = Generation(
            indices, lambda: self._abort([message.request_id for message, _ in added]), http_request_id
        )
        for message, sequences in added:
            if sequences:
                self._send(
                    message,
                    ActiveRequest(generation, message.spec.num_prompt_tokens, arrival, sequences),
                    http_request_id,
                )
                http_request_id = None
        return generation

    def _send(self, message: AddRequest, request: ActiveRequest, http_request_id: str | None) -> None:
        dispatch = self._dispatcher.choose(message.spec.prompt_token_ids, message.spec.cache_salt)
        request.prefill_tokens = dispatch.prefill_tokens
        core = self._cores[dispatch.core]
        core.add(message.request_id, request)
        core.channel.send(msgspec.structs.replace(message, http_request_id=http_request_id))

    def move_requests(self, http_request_id: str | None = None) -> None:
        """Have those of all API processes that can go on in another engine end here, as soon as the cores say so.
        `http_request_id`: only those that came with it.
        """
        for core in self._cores:
            core.channel.send(MoveRequests(http_request_id=http_request_id))

    def end_requests(self, names: Sequence[str]) -> None:
        """Have those of all API processes end with what they have, `abort` as their reason; unknown ones have ended.
        A name is an answer's, or the one that its request came with.
        """
        self._cores[0].channel.send(EndRequests(names=list(names)))  # which tells all API processes

    def reset_prefix_cache(self) -> None:
        """Requests that come from now on find nothing that was cached before."""
        for core in self._cores:
            core.channel.send(ResetPrefixCache())

    @property
    def sleep_level(self) -> int | None:
        """None: all cores are awake."""
        return max((core.sleep_level for core in self._cores if core.sleep_level is not None), default=None)

    def check_awake(self) -> None:
        """Raises EngineAsleepError."""
        if (level := self.sleep_level) is not None:
            raise EngineAsleepError(level)

    async def sleep(self, level: int) -> None:
        """Until all cores do. What is under way ends with an EngineAsleepError. Raises EngineDeadError."""
        await self._have_all(Sleep(level=level), lambda core: core.sleep_level is not None)

    async def wake_up(self) -> None:
        """Until all cores take requests again. Raises EngineDeadError."""
        await self._have_all(WakeUp(), lambda core: core.sleep_level is None)

    async def _have_all(self, message: ToCore, is_done: Callable[[CoreClient], bool]) -> None:
        for core in self._cores:
            if not is_done(core):
                core.channel.send(message)
        while self.dead is None and not all(map(is_done, self._cores)):
            self._has_news.clear()
            await self._has_news.wait()
        if self.dead is not None:
            raise self.dead

    async def wait_until_pulled(self) -> None:
        """Until no blocks are kept for other engines: they have them, or their time is over."""
        while self._keeps_blocks():
            self._has_news.clear()
            await self._has_news.wait()

    def _keeps_blocks(self) -> bool:
        stats = None if self.stats is None else self.stats.transfers
        if stats is None or self.dead is not None:
            return False
        return stats.num_requests_kept < self._num_handed_over or stats.num_leased_blocks > 0

    def give_up(self, error: KvasirRuntimeError) -> None:
        """Ends every generation with the error; the core drops their requests as they are left."""
        for core in self._cores:
            core.give_up(error)

    def _added(
        self, request: GenerateRequest, first: int, so_far: Mapping[int, SequenceDelta]
    ) -> tuple[AddRequest, dict[int, ActiveSequence]]:
        """The core's order for what is left to generate, and our side of its sequences, the first of them `first`."""
        starts, sequences = [], {}
        for index in range(request.n):
            begun = so_far.get(first + index, SequenceDelta(index=first + index))
            if begun.finish_reason is None:
                seed = child_seed(request.spec.sampling.seed, index)
                starts.append(SequenceStart(index=index, seed=seed, output_token_ids=begun.token_ids))
                sequences[index] = ActiveSequence(begun.index, self._detokenizer_behind(begun, request))
        return self._message(request, starts), sequences

    def _detokenizer_behind(self, begun: SequenceDelta, request: GenerateRequest) -> Detokenizer:
        detokenizer = Detokenizer(self._tokenizer, request.text, request.spec.prompt_token_ids)
        begun.text, stop, _ = detokenizer.feed(begun.token_ids)
        if stop is not None:
            raise InvalidRequestError(f"the sequence to be continued had ended already, at the stop string {stop!r}")
        return detokenizer

    def _message(self, request: GenerateRequest, sequences: list[SequenceStart]) -> AddRequest:
        spec = request.spec
        if all(sequence.output_token_ids for sequence in sequences):  # the prompt's were sent with the first token
            spec = spec.with_sampling(msgspec.structs.replace(spec.sampling, prompt_logprobs=None))
        return AddRequest(
            request_id=f"{request.request_id}:{self._api_index}.{next(self._counter)}",
            api_index=self._api_index,
            spec=spec,
            sequences=sequences,
            arrival_time=time.time() if request.arrival_time is None else request.arrival_time,
        )

    def _hand_over(self, core: CoreClient, message: RequestsMove) -> None:
        moving = {
            request_id: one.generation
            for request_id, one in core.requests.items()
            if one.generation.can_move and message.http_request_id in (None, one.generation.http_request_id)
        }
        for request_id, generation in moving.items():
            key = request_id if generation.has_one_sequence and generation.can_keep else None
            self._num_handed_over += key is not None
            self._abort([request_id], is_kept=key is not None)
            generation.fail(RequestMovedError(message.host, message.port, key))

    def _abort(self, request_ids: Sequence[str], *, is_kept: bool = False) -> None:
        """Have the cores drop what is left of these requests."""
        now = self._clock()
        for core in self._cores:
            left = {request_id: request for request_id in request_ids if (request := core.remove(request_id))}
            for request in left.values():
                for _ in request.sequences:
                    self._metrics.finished("abort", now - request.arrival)
            if left:
                core.channel.send(AbortRequests(aborts=[Abort(request_id, is_kept=is_kept) for request_id in left]))

    def _handle(self, core: CoreClient, message: FromCore) -> None:
        match message:
            case StepOutputs():
                self._distribute(core, message)
            case EngineReady():
                core.ready = message
                core.stats = _stats_at_start(message)
                core.sleep_level = None
                self._note_ready()
                self._has_news.set()
            case Asleep():
                core.sleep_level = message.level
                core.give_up(EngineAsleepError(message.level))
                self._has_news.set()
            case RequestsMove():
                self._hand_over(core, message)
            case RequestsEnd():
                self._end_named(frozenset(message.names))
            case EngineFailed():
                self._die(EngineDeadError(f"the engine core{self._which(core)} has failed: {message.error}"))

    def _end_named(self, names: Set[str]) -> None:
        now = self._clock()
        for core in self._cores:
            ending = {
                request_id: request
                for request_id, request in core.requests.items()
                if names & {request_id.rpartition(":")[0], request.generation.http_request_id}
            }
            for request_id, request in ending.items():
                for index, sequence in list(request.sequences.items()):
                    output = SequenceOutput(request_id=request_id, index=index, new_token_ids=[], finish_reason="abort")
                    self._receive(core, request, sequence, output, now)
                core.channel.send(AbortRequests(aborts=[Abort(request_id)]))

    def _note_ready(self) -> None:
        readies = [core.ready for core in self._cores if core.ready is not None]
        if len(readies) == len(self._cores):
            self.ready = total_ready(readies)

    def _which(self, core: CoreClient) -> str:
        return f" of data-parallel rank {self._cores.index(core)}" if len(self._cores) > 1 else ""

    def _distribute(self, core: CoreClient, step: StepOutputs) -> None:
        now = self._clock()
        if step.outputs or step.plain or core.stats is None or step.stats.num_steps > core.stats.num_steps:
            core.last_progress = now
        core.stats = step.stats
        self._has_news.set()
        for output in itertools.chain(step.outputs, _unpacked(step.plain)):
            request = core.requests.get(output.request_id)
            sequence = None if request is None else request.sequences.get(output.index)
            if request is not None and sequence is not None:  # else it ended while this was on its way
                self._receive(core, request, sequence, output, now)

    def _receive(
        self, core: CoreClient, request: ActiveRequest, sequence: ActiveSequence, output: SequenceOutput, now: float
    ) -> None:
        delta = request.delta(sequence, output)
        self._observe(core, request, sequence, delta, now)
        if output.admitted_at is not None:
            self._metrics.prefilled(output.admitted_at - request.arrival, now - output.admitted_at)
        if delta.finish_reason is not None:
            self._end(core, request, output, delta.finish_reason, now)
        if delta.finish_reason == "error":
            error = output.error or "the engine gave up on this request and did not say why"
            kind = RequestTooLargeError if output.is_too_large else RequestFailedError
            request.generation.fail(kind(error))
        else:
            request.generation.receive(delta)

    def _observe(
        self, core: CoreClient, request: ActiveRequest, sequence: ActiveSequence, delta: SequenceDelta, now: float
    ) -> None:
        if not delta.token_ids and delta.pooled is None:
            return
        if not request.has_begun:
            self._metrics.began(request.num_prompt_tokens, delta.num_cached_tokens)
            core.take_begun(request)
        request.has_begun = True
        if delta.pooled is not None:
            return
        if sequence.first_token is None:
            sequence.first_token = now
            self._metrics.first_tokens(len(delta.token_ids), now - request.arrival)
        else:
            self._metrics.next_tokens(len(delta.token_ids), now - sequence.last_token)
        sequence.last_token = now
        sequence.num_tokens += len(delta.token_ids)

    def _end(
        self, core: CoreClient, request: ActiveRequest, output: SequenceOutput, reason: FinishReason, now: float
    ) -> None:
        """Forget a sequence, and end it in the core where a stop string did that here."""
        sequence = request.sequences.pop(output.index)
        self._metrics.finished(reason, now - request.arrival)
        if sequence.first_token is not None:
            self._metrics.decoded(sequence.num_tokens, now - sequence.first_token)
            request.most_tokens = max(request.most_tokens, sequence.num_tokens)
        if not request.sequences:
            core.remove(output.request_id)
            self._metrics.most_generated(request.most_tokens)
        if output.finish_reason is None:
            core.channel.send(AbortRequests(aborts=[Abort(output.request_id, output.index)]))

    def _die(self, error: EngineDeadError) -> None:
        self.dead = error
        self._has_news.set()
        self.give_up(error)
        for core in self._cores:
            core.clear()


def _unpacked(plain: PlainTokens | None) -> Iterator[SequenceOutput]:
    if plain is None:
        return
    start = 0
    for request_id, index, num_tokens in zip(plain.request_ids, plain.indices, plain.num_tokens, strict=True):
        token_ids = plain.token_ids[start : start + num_tokens]
        yield SequenceOutput(request_id=request_id, index=index, new_token_ids=token_ids)
        start += num_tokens


def _stats_at_start(ready: EngineReady) -> SchedulerStats:
    """So that series are there, at zero, before the first step; autoscalers take a missing one for an error."""
    return SchedulerStats(
        num_running=0,
        num_waiting=0,
        num_blocks_used=0,
        num_blocks=ready.num_blocks,
        kv_capacity_tokens=ready.kv_capacity_tokens,
        num_steps=0,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        last_step_time=time.time(),
    )


def child_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request; the first keeps the request's, so n does not change it."""
    if index == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")
