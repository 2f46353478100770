"""An answer as it comes, read as thoughts, text and calls of tools.

Marks are known by their text, so special tokens must be in it; of token ids nothing is needed. What looks like a call
and is none, an unknown tool's included, is text; arguments that are broken are handed on as they are. Nothing that a
model wrote is left out but marks, white space beside them, and what a call has beside name, id and arguments.
"""

from collections.abc import Mapping
from typing import Any, Final

from kvasir_runtime.talk.calls import CallReader
from kvasir_runtime.talk.channels import ChannelReader
from kvasir_runtime.talk.events import Event, EventWriter
from kvasir_runtime.talk.format import CallFormat, Channels, ReasoningFormat
from kvasir_runtime.talk.scanner import WHITE_SPACE, Reading, Scanner, marks_of

NEWLINES: Final = "\r\n"
TURN_MARKS: Final = (
    "<|im_",
    "<|start",
    "<|end",
    "<|eo",
    "<|user",
    "<|assistant",
    "<|turn",
    "<\uff5c",
    "[/INST]",
    "]~b]",
)
"""Beginnings of marks between turns: no thought goes on after one."""


class AnswerParser:
    """Of one answer. `tools` are the schemas of their arguments, by name. `is_thinking`: the prompt has begun a
    thought, as `is_thought_open` says."""

    def __init__(
        self,
        calls: CallFormat | Channels | None,
        reasoning: ReasoningFormat | Channels | None,
        *,
        tools: Mapping[str, Any],
        is_thinking: bool,
    ) -> None:
        self._scanner = Scanner()
        self._events = EventWriter()
        channels = next((each for each in (calls, reasoning) if isinstance(each, Channels)), None)
        if channels is not None:
            known = tools if calls is not None else {}
            self._steps = ChannelReader(
                self._scanner, self._events, channels, known, has_thoughts=reasoning is not None
            ).read()
        else:
            self._steps = self._read(calls, reasoning, tools, is_thinking)  # type: ignore[arg-type]  # no channels

    def feed(self, text: str) -> list[Event]:
        """What is known now. Less than was fed where more text may make a mark of its end."""
        self._scanner.add(text)
        return self._go_on()

    def finish(self, *, is_cut: bool = True) -> list[Event]:
        """What was held back. `is_cut`: the model did not end the answer itself; if it did, arguments whose closing
        mark is missing are closed."""
        self._scanner.end(is_cut=is_cut)
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        return self._events.take()

    def _read(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Mapping[str, Any],
        is_thinking: bool,
    ) -> Reading[None]:
        reader = CallReader(self._scanner, self._events, calls, tools) if calls is not None else None
        if reasoning is not None:
            yield from self._read_thoughts(reasoning, reader, calls, is_thinking)
        if reader is not None:
            yield from reader.read_bare()
        thoughts = reasoning.opened if reasoning is not None and reasoning.is_anywhere else ()
        held = WHITE_SPACE if reader is not None or thoughts else ""
        while True:
            marks = marks_of(*thoughts, *(reader.marks if reader is not None else ()))
            mark = yield from self._scanner.take_until(marks, self._events.say, held=held)
            if mark is None:
                break
            if reasoning is not None and mark in thoughts:
                yield from self._read_thoughts(reasoning, reader, calls, is_open=False)
            elif reader is not None:
                yield from reader.read(self._events.say)
        space = yield from self._scanner.take_while(WHITE_SPACE)
        if not self._events.num_calls:
            self._events.say(space)

    def _read_thoughts(
        self, reasoning: ReasoningFormat, reader: CallReader | None, calls: CallFormat | None, is_open: bool
    ) -> Reading[None]:
        """All that begin here."""
        opened = marks_of(*reasoning.opened)
        while True:
            self._scanner.set_anchor()
            yield from self._scanner.take_while(WHITE_SPACE)
            mark = yield from self._scanner.take_mark(opened)
            if mark is None and not is_open:
                self._scanner.go_to(0)
                self._scanner.lift_anchor()
                return
            self._scanner.lift_anchor()
            yield from self._scanner.take_while(NEWLINES)
            if not (yield from self._read_thought(reasoning, reader if calls and calls.ends_thought else None)):
                return
            is_open = False

    def _read_thought(self, reasoning: ReasoningFormat, reader: CallReader | None) -> Reading[bool]:
        """Whether it was closed; else a call ended it, or the answer did."""
        marks = marks_of(*reasoning.closed, *(reader.marks if reader is not None else ()))
        while True:
            mark = yield from self._scanner.take_until(marks, self._events.think, held=WHITE_SPACE)
            if mark is None:
                self._events.think((yield from self._scanner.take_while(WHITE_SPACE)))
                return False
            if mark in reasoning.closed:
                space = yield from self._scanner.take_while(WHITE_SPACE)
                self._events.think(space.rstrip(NEWLINES))
                self._scanner.take(len(mark))
                yield from self._scanner.take_while(NEWLINES)
                return True
            if reader is not None and (yield from reader.read(self._events.think)):
                return False


def is_thought_open(reasoning: ReasoningFormat | Channels, prompt: str) -> bool:
    """Whether a prompt, or its last part, ends within a thought."""
    if isinstance(reasoning, Channels):
        return False
    begun = max((prompt.rfind(mark) + len(mark) for mark in reasoning.opened if mark in prompt), default=None)
    if begun is None:
        return False
    rest = prompt[begun:]
    return not any(mark in rest for mark in (*reasoning.closed, *TURN_MARKS))
