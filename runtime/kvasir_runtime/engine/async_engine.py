"""The engine as an API process sees it: hand in a prompt, get text and tokens as they come.

It owns what is under way in this process. A generation that is left before its end is aborted in the core, a core that
dies fails every generation, and `is_stalled` tells a hung core from an idle one.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvasir_runtime.engine.channel import EngineChannel
from kvasir_runtime.engine.detokenizer import Detokenizer, TextOptions
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    FinishReason,
    FromCore,
    RequestOutput,
    SamplingParams,
    SchedulerStats,
    StepOutputs,
)
from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import EngineDeadError, InvalidRequestError, KvasirRuntimeError, ServerUnavailableError
from kvasir_runtime.metrics import RequestMetrics

_NOTHING: Mapping[int, SequenceDelta] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and how it is continued, in `n` sequences."""

    request_id: str
    """Shown in logs; need not be unique."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    text: TextOptions
    n: int = 1
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    arrival_time: float | None = None
    """Seconds since the epoch; None: now. It decides on the request's place among those that wait."""


@dataclass(slots=True)
class _Addressee:
    """Whom the outputs of one request id are for, and its times (monotonic seconds) for the metrics."""

    generation: Generation
    index: int
    num_prompt_tokens: int
    arrival: float
    last_token: float | None = None


class AsyncEngine:
    """One per API process, on its event loop. `run` must be running for anything to arrive."""

    def __init__(
        self, channel: EngineChannel, tokenizer: Tokenizer, metrics: RequestMetrics, *, api_index: int
    ) -> None:
        self._channel = channel
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._api_index = api_index
        self._counter = itertools.count()
        self._addressees: dict[str, _Addressee] = {}
        self._last_progress = time.monotonic()
        self._dead: EngineDeadError | None = None
        self.ready: EngineReady | None = None
        self.stats: SchedulerStats | None = None

    async def run(self) -> None:
        """Hand out what the core sends until it has died. Cancel it to stop listening."""
        try:
            while self._dead is None:
                for message in await self._channel.receive():
                    self._handle(message)
        except EngineDeadError as error:
            self._die(error)

    @property
    def dead(self) -> EngineDeadError | None:
        return self._dead

    def is_stalled(self, stall_seconds: float) -> bool:
        """Work of this process is pending, and for so long no step has finished."""
        return bool(self._addressees) and time.monotonic() - self._last_progress > stall_seconds

    def generate(
        self, requests: Sequence[GenerateRequest], so_far: Mapping[int, SequenceDelta] = _NOTHING
    ) -> Generation:
        """Starts at once; the sequences are numbered through all requests, `n` of the first one first.

        `so_far`: what other engines have made of some of them; only what follows is generated. Raises EngineDeadError,
        ServerUnavailableError before the core is ready, and InvalidRequestError where nothing can follow.
        """
        if self._dead is not None:
            raise self._dead
        if self.ready is None:
            raise ServerUnavailableError("the model is still loading; wait until /ready answers 200")
        arrival = time.monotonic()
        if not self._addressees:
            self._last_progress = arrival  # an idle core had nothing to make progress with
        sequences = dict(self._sequences(requests, so_far))
        generation = Generation(
            {index: child.request_id for index, (child, _) in sequences.items()},
            {index: detokenizer for index, (_, detokenizer) in sequences.items()},
            self._end_early,
        )
        for index, (child, _) in sequences.items():
            self._addressees[child.request_id] = _Addressee(generation, index, len(child.prompt_token_ids), arrival)
            self._channel.send(child)
        return generation

    def give_up(self, error: KvasirRuntimeError) -> None:
        """Ends every generation with the error; the core drops their requests as they are left."""
        for addressee in self._addressees.values():
            addressee.generation.fail(error)

    def _sequences(
        self, requests: Sequence[GenerateRequest], so_far: Mapping[int, SequenceDelta]
    ) -> Iterator[tuple[int, tuple[AddRequest, Detokenizer]]]:
        """What is left to generate, by index."""
        children = [(request, child) for request in requests for child in self._children(request)]
        for index, (request, child) in enumerate(children):
            detokenizer = Detokenizer(self._tokenizer, request.text)
            begun = so_far.get(index)
            if begun is None:
                yield index, (child, detokenizer)
            elif begun.finish_reason is None:
                _skip(detokenizer, begun.token_ids)
                yield index, (_continued(child, begun.token_ids), detokenizer)

    def _children(self, request: GenerateRequest) -> Iterator[AddRequest]:
        arrival_time = time.time() if request.arrival_time is None else request.arrival_time
        for index in range(request.n):
            yield AddRequest(
                request_id=f"{request.request_id}:{self._api_index}.{next(self._counter)}",
                api_index=self._api_index,
                prompt_token_ids=request.prompt_token_ids,
                sampling=msgspec.structs.replace(request.sampling, seed=child_seed(request.sampling.seed, index)),
                arrival_time=arrival_time,
                priority=request.priority,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
            )

    def _end_early(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """Have the core drop those that it has not finished itself."""
        now = time.monotonic()
        under_way = [request_id for request_id in request_ids if request_id in self._addressees]
        for request_id in under_way:
            self._metrics.finished(reason, now - self._addressees.pop(request_id).arrival)
        if under_way:
            self._channel.send(AbortRequests(request_ids=under_way))

    def _handle(self, message: FromCore) -> None:
        match message:
            case StepOutputs():
                self._distribute(message)
            case EngineReady():
                self.ready = message
                self.stats = _stats_at_start(message)
            case EngineFailed():
                self._die(EngineDeadError(f"the engine core has failed: {message.error}"))

    def _distribute(self, step: StepOutputs) -> None:
        now = time.monotonic()
        if step.outputs or self.stats is None or step.stats.num_steps > self.stats.num_steps:
            self._last_progress = now
        self.stats = step.stats
        for output in step.outputs:
            addressee = self._addressees.get(output.request_id)
            if addressee is None:  # aborted while this was on its way
                continue
            self._observe(addressee, output, now)
            if output.finish_reason is not None:
                del self._addressees[output.request_id]
            addressee.generation.receive(addressee.index, output)

    def _observe(self, addressee: _Addressee, output: RequestOutput, now: float) -> None:
        if output.new_token_ids:
            if addressee.last_token is None:
                self._metrics.first_token(now - addressee.arrival, addressee.num_prompt_tokens)
            else:
                self._metrics.next_token(now - addressee.last_token)
            addressee.last_token = now
            self._metrics.generated(len(output.new_token_ids))
        if output.finish_reason is not None:
            self._metrics.finished(output.finish_reason, now - addressee.arrival)

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        for addressee in self._addressees.values():
            addressee.generation.fail(error)
        self._addressees.clear()


def _skip(detokenizer: Detokenizer, token_ids: list[int]) -> None:
    """Feeds tokens whose text is out."""
    _, stop, _ = detokenizer.feed(token_ids)
    if stop is not None:
        raise InvalidRequestError(f"the sequence to be continued had ended already, at the stop string {stop!r}")


def _continued(child: AddRequest, token_ids: list[int]) -> AddRequest:
    """The prompt's own log-probabilities were sent with the first token."""
    sampling = msgspec.structs.replace(child.sampling, prompt_logprobs=None) if token_ids else child.sampling
    return msgspec.structs.replace(child, output_token_ids=token_ids, sampling=sampling)


def _stats_at_start(ready: EngineReady) -> SchedulerStats:
    """So that series are there, at zero, before the first step; autoscalers take a missing one for an error."""
    return SchedulerStats(
        num_running=0,
        num_waiting=0,
        num_blocks_used=0,
        num_blocks=ready.num_blocks,
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
