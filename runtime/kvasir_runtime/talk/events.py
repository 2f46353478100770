"""What an answer is read as, in its order. Neighbouring texts of one kind are pieces of one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    """Of the answer's calls, from 0."""
    name: str
    call_id: str | None
    """None: the model wrote none."""


@dataclass(frozen=True, slots=True)
class Arguments:
    index: int
    text: str
    """A piece of the JSON text of the arguments."""


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Without it the call was cut, or never closed."""

    index: int


Event = Content | Reasoning | CallBegun | Arguments | CallEnded


class EventWriter:
    """Gathers them until they are taken. One call is open at a time."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def say(self, text: str) -> None:
        match self._events[-1:]:
            case [Content(text=before)]:
                self._events[-1] = Content(before + text)
            case _ if text:
                self._events.append(Content(text))

    def think(self, text: str) -> None:
        match self._events[-1:]:
            case [Reasoning(text=before)]:
                self._events[-1] = Reasoning(before + text)
            case _ if text:
                self._events.append(Reasoning(text))

    def begin_call(self, name: str, call_id: str | None) -> None:
        self._events.append(CallBegun(self.num_calls, name, call_id))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        match self._events[-1:]:
            case [Arguments(index=index, text=before)]:
                self._events[-1] = Arguments(index, before + text)
            case _ if text:
                self._events.append(Arguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        self._events.append(CallEnded(self.num_calls - 1))
