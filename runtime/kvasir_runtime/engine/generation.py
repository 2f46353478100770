"""The answer to one HTTP request as it comes: text and tokens of its sequences, until each has its end.

Text is made and stop strings are found on arrival, however slowly the client reads: a sequence is ended in the core at
the step that completes its stop string.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from kvasir_runtime.engine.detokenizer import Detokenizer
from kvasir_runtime.errors import KvasirRuntimeError, RequestMovedError
from kvasir_runtime.requests.outputs import FinishReason, SequenceOutput, TokenLogprobs
from kvasir_runtime.transfer.params import KvTransferParams


class SequenceDelta(msgspec.Struct, kw_only=True):
    """What has come for one sequence since the last delta, or what another engine has made of it.

    One is made for each token, and a struct takes a quarter of the time of a dataclass.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: bytes | None = None
    """The vector of a request that wants no tokens, little-endian float32."""
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token, that ended the sequence."""
    kv_transfer_params: KvTransferParams | None = None
    """With the end of a request whose prompt is kept for another engine."""


def joined(deltas: Sequence[SequenceDelta]) -> SequenceDelta:
    """One delta for all of these, which are of one sequence and in their order."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return SequenceDelta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=list(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=list(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        kv_transfer_params=last.kv_transfer_params,
    )


class Generation:
    """The sequences of one or more requests: a context manager (left early, it ends them) that iterates over deltas.

    Each turn gives all that has arrived, one delta per sequence, so a slow reader gets fewer and longer deltas; `whole`
    gives everything at once, and wakes its reader for nothing else.
    """

    def __init__(self, indices: Iterable[int], leave: Callable[[], None], http_request_id: str | None = None) -> None:
        """`leave` is called when the block ends before its sequences."""
        self.http_request_id = http_request_id
        self._unfinished = set(indices)
        self.has_one_sequence = len(self._unfinished) == 1
        self._leave = leave
        self._arrived: dict[int, list[SequenceDelta]] = {}
        self._has_news = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._error: KvasirRuntimeError | None = None
        self.can_move = False
        """Whether another engine can go on with it: whoever keeps its journal gets, and can keep, what was read."""
        self.can_keep = False
        """Whether that engine will be told where the blocks are: else nobody asks for those that are kept."""

    @property
    def is_moving(self) -> bool:
        """Another engine goes on from what whoever iterates makes of it."""
        return isinstance(self._error, RequestMovedError)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._unfinished:
            self._leave()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[SequenceDelta]:
        """Raises what `fail` was given, after all that came before."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        arrived, self._arrived = self._arrived, {}
        return [deltas[0] if len(deltas) == 1 else joined(deltas) for deltas in arrived.values()]

    async def whole(self) -> list[SequenceDelta]:
        """All sequences in the order of their indices, once each has its end. Raises what `fail` was given."""
        if self._unfinished:
            await self._has_ended.wait()
        if self._error is not None:
            raise self._error
        return [joined(self._arrived[index]) for index in sorted(self._arrived)]

    def receive(self, delta: SequenceDelta) -> None:
        if self._error is not None:
            return
        self._arrived.setdefault(delta.index, []).append(delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
            if not self._unfinished:
                self._has_ended.set()
        self._has_news.set()

    def fail(self, error: KvasirRuntimeError) -> None:
        """Nothing more is received; whoever iterates gets what is there and then the error."""
        self._error = self._error or error
        self._has_news.set()
        self._has_ended.set()


@dataclass(slots=True)
class ActiveSequence:
    """One that has not ended."""

    delta_index: int
    """Among all sequences of its generation, which may be of several requests."""
    detokenizer: Detokenizer
    first_token: float | None = None
    """Monotonic seconds."""
    last_token: float = 0.0
    """The same, once there was a first."""
    num_tokens: int = 0
    """Generated here."""


@dataclass(slots=True)
class ActiveRequest:
    """A request that a core works on."""

    generation: Generation
    num_prompt_tokens: int
    arrival: float
    """Monotonic seconds."""
    sequences: dict[int, ActiveSequence]
    """Those that have not ended, by their index in the request."""
    prefill_tokens: int = 0
    """Of its prompt, that its core is still expected to compute."""
    has_begun: bool = False
    """Whether a token of any sequence has come."""
    most_tokens: int = 0
    """Of a sequence that has ended."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Sent by the core once, shown with the first token of each sequence."""

    def delta(self, sequence: ActiveSequence, output: SequenceOutput) -> SequenceDelta:
        """What an output brings for one of its sequences."""
        token_ids, detokenizer = output.new_token_ids, sequence.detokenizer
        if output.finish_reason is None:
            new = detokenizer.feed(token_ids)
        else:
            new = detokenizer.finish(token_ids, output.stop_token_id)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        delta = SequenceDelta(
            index=sequence.delta_index,
            text=new.text,
            token_ids=token_ids,
            logprobs=output.logprobs or [],
            prompt_logprobs=self.prompt_logprobs if sequence.first_token is None else None,
            pooled=output.pooled,
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_token_id,
            kv_transfer_params=output.kv_transfer_params,
        )
        if new.stop is not None:
            delta.token_ids, delta.logprobs = token_ids[: new.num_tokens], delta.logprobs[: new.num_tokens]
            delta.finish_reason, delta.stop_reason = "stop", new.stop
        return delta
