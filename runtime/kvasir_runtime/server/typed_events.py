"""What Messages and Responses do alike: behind their own words their requests are chat's, and their streams are typed
events of one sequence, several for one token. A stream begins with its first token, when it is known how much of the
prompt was cached.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.server.exchange import UsageMeter
from kvasir_runtime.server.protocol import ChatCompletionRequest
from kvasir_runtime.server.responses import Usage, to_json
from kvasir_runtime.server.serving import Prepared
from kvasir_runtime.talk.events import Content, Event

Told = tuple[str, dict[str, Any]]
"""An event's type, and its other fields."""
Chat = TypeVar("Chat", bound=ChatCompletionRequest)


class Output(Protocol):
    """The parts of an answer; at most one is open."""

    def add(self, event: Event) -> Iterator[Told]: ...


class TypedEventShape(ABC, Generic[Chat]):
    def __init__(self, prepared: Prepared[Chat], output: Output) -> None:
        self.wishes = prepared.wishes
        self.heading = prepared.heading
        self._output = output
        self._reader = prepared.reader()
        self._has_begun = False

    @abstractmethod
    def begin(self, usage: Usage) -> Iterator[Told]: ...

    @abstractmethod
    def finish(self, delta: SequenceDelta, usage: Usage) -> Iterator[Told]: ...

    @abstractmethod
    def to_event(self, kind: str, fields: dict[str, Any]) -> bytes: ...

    def skip(self, sequence: SequenceDelta) -> None:
        self._has_begun = True
        for _ in self._added(sequence):
            pass

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        return delta

    def first_event(self, meter: UsageMeter) -> bytes:
        return b""

    def event(self, delta: SequenceDelta, meter: UsageMeter) -> bytes:
        return b"".join(self.to_event(kind, fields) for kind, fields in self._told(delta, meter.usage()))

    def usage_event(self, usage: Usage) -> bytes:
        """It came with the end of the only sequence."""
        return b""

    def read(self, delta: SequenceDelta) -> Sequence[Event]:
        return [Content(delta.text)] if self._reader is None else self._reader.read(delta)

    def _told(self, delta: SequenceDelta, usage: Usage) -> Iterator[Told]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin(usage)
        yield from self._added(delta)
        if delta.finish_reason is not None:
            yield from self.finish(delta, usage)

    def _added(self, delta: SequenceDelta) -> Iterator[Told]:
        for event in self.read(delta):
            yield from self._output.add(event)


def written(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json({"type": kind} | fields))
