"""The answer to one request as it comes: what the core sent for its sequences, as text, until each has its end."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kvasir_runtime.engine.detokenizer import Detokenizer
from kvasir_runtime.engine.messages import FinishReason, RequestOutput, TokenLogprobs
from kvasir_runtime.errors import KvasirRuntimeError, RequestFailedError


@dataclass(slots=True, kw_only=True)
class SequenceDelta:
    """What has come for one sequence since the last delta, or (without text) what another engine has made of it."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of a stop token, that ended the sequence."""


EndEarly = Callable[[Sequence[str], FinishReason], None]


class Generation:
    """The sequences of one or more requests: a context manager (left early, it aborts them) that iterates over deltas.

    Each turn gives all that has arrived, one delta per sequence, so a slow reader gets fewer and longer deltas. Request
    ids and detokenizers are given by the sequences' indices.
    """

    def __init__(
        self, request_ids: Mapping[int, str], detokenizers: Mapping[int, Detokenizer], end_early: EndEarly
    ) -> None:
        self._unfinished = dict(request_ids)
        self._detokenizers = detokenizers
        self._end_early = end_early
        self._arrived: dict[int, list[RequestOutput]] = {}
        self._has_news = asyncio.Event()
        self._error: KvasirRuntimeError | None = None

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._unfinished:
            self._end_early(list(self._unfinished.values()), "abort")
            self._unfinished.clear()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[SequenceDelta]:
        """Raises what `fail` was given, after all that came before, and RequestFailedError when the core gave up."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        arrived, self._arrived = self._arrived, {}
        return [self._delta(index, outputs) for index, outputs in arrived.items() if index in self._unfinished]

    def receive(self, index: int, output: RequestOutput) -> None:
        if self._error is None:
            self._arrived.setdefault(index, []).append(output)
            self._has_news.set()

    def fail(self, error: KvasirRuntimeError) -> None:
        """Nothing more is received; whoever iterates gets the error."""
        self._error = error
        self._has_news.set()

    def _delta(self, index: int, outputs: list[RequestOutput]) -> SequenceDelta:
        delta = SequenceDelta(index=index)
        for output in outputs:
            self._extend(delta, output)
            if delta.finish_reason is not None:
                break
        return delta

    def _extend(self, delta: SequenceDelta, output: RequestOutput) -> None:
        text, stop, num_used = self._detokenize(delta.index, output)
        delta.text += text
        delta.token_ids += output.new_token_ids[:num_used]
        delta.logprobs += (output.logprobs or [])[:num_used]
        delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        delta.num_cached_tokens = output.num_cached_tokens or delta.num_cached_tokens
        if stop is not None or output.finish_reason is not None:
            self._finish(delta, output, stop)

    def _detokenize(self, index: int, output: RequestOutput) -> tuple[str, str | None, int]:
        if output.finish_reason is None:
            return self._detokenizers[index].feed(output.new_token_ids)
        return self._detokenizers[index].finish(output.new_token_ids, output.stop_token_id)

    def _finish(self, delta: SequenceDelta, output: RequestOutput, stop: str | None) -> None:
        request_id = self._unfinished.pop(delta.index)
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
            if output.finish_reason is None:
                self._end_early([request_id], "stop")
        elif output.finish_reason == "error":
            raise RequestFailedError(output.error or "the engine gave up on this request and did not say why")
        else:
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_token_id
