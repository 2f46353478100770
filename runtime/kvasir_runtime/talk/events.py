"""What an answer is read as, in its order. Neighbouring texts of one kind may be joined: they are pieces of one."""

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
    """No such event: the call was cut, or never closed."""

    index: int


Event = Content | Reasoning | CallBegun | Arguments | CallEnded
