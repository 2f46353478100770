"""An answer as it comes, read as thoughts, text and calls of tools.

Marks are known by their text, so special tokens must be in it. What looks like a call and is none, an unknown tool's
included, is text; arguments that are broken are handed on as they are. Nothing that a model wrote is left out but
marks, and white space beside them.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from kvasir_runtime.talk.formats import CallFormat, ReasoningFormat
from kvasir_runtime.talk.literals import JSON, read_value
from kvasir_runtime.talk.scanner import WHITE_SPACE, Marks, Reading, Scanner, Write, marks_of

NEWLINES: Final = "\r\n"
NAME_KEY: Final = "name"
ARGUMENT_KEYS: Final = ("arguments", "parameters")
KEYS_BEFORE_NAME: Final = ("id", "type", *ARGUMENT_KEYS)
"""An object with others before its name is no call: so an answer in JSON is not held back for long."""
TURN_MARKS: Final = ("<|", "<\uff5c", "[/INST]", "]~b]")
"""Parts of marks between turns: a thought has none."""


class AnswerParser:
    """Of one answer. `tools` are the schemas of the arguments, by name. `is_thinking`: the prompt has begun a
    thought, as `is_thought_open` says. A parser needs nothing of tokens but their text."""

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        tools: Mapping[str, Any],
        is_thinking: bool,
    ) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._tools = tools
        self._scanner = Scanner()
        self._events: list[Event] = []
        self._num_calls = 0
        self._is_in_section = False
        self._steps = self._answer(is_thinking)

    def feed(self, text: str) -> list[Event]:
        self._scanner.add(text)
        return self._go_on()

    def finish(self) -> list[Event]:
        """What was held back, since more text might have made a mark of it."""
        self._scanner.end()
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _answer(self, is_thinking: bool) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._thoughts(self._reasoning, is_thinking)
        if self._calls is not None and self._calls.bare:
            yield from self._try_calls(self._calls, self._say)
        openings = self._openings()
        held = WHITE_SPACE if self._calls is not None else ""
        while (yield from self._scanner.take_until(openings, self._say, held=held)) is not None:
            assert self._calls is not None
            yield from self._try_calls(self._calls, self._say)
        rest = yield from self._scanner.take_while(WHITE_SPACE)
        if not self._num_calls:
            self._say(rest)

    def _openings(self) -> Marks:
        if self._calls is None:
            return marks_of()
        return marks_of(*self._calls.opened, *self._calls.section_opened)

    # Thoughts.

    def _thoughts(self, reasoning: ReasoningFormat, is_open: bool) -> Reading[None]:
        """At the answer's beginning."""
        opened = marks_of(reasoning.opened)
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
            if not (yield from self._thought(reasoning)):
                return
            is_open = False

    def _thought(self, reasoning: ReasoningFormat) -> Reading[bool]:
        """Whether it was closed; else a call came, or the end."""
        closed = marks_of(reasoning.closed)
        openings = self._openings().marks if self._calls is not None and self._calls.ends_thought else ()
        while True:
            mark = yield from self._scanner.take_until(
                marks_of(reasoning.closed, *openings), self._think, held=NEWLINES
            )
            if mark is None:
                self._think((yield from self._scanner.take_while(NEWLINES)))
                return False
            if mark == reasoning.closed:
                yield from self._scanner.take_while(NEWLINES)
                yield from self._scanner.take_mark(closed)
                yield from self._scanner.take_while(NEWLINES)
                return True
            assert self._calls is not None
            if (yield from self._try_calls(self._calls, self._think)):
                return False

    # Calls.

    def _try_calls(self, calls: CallFormat, otherwise: Write) -> Reading[bool]:
        """At white space and what opens a call, or nothing where calls may be bare. What is no call is handed on, as
        far as its first mark."""
        self._scanner.set_anchor()
        space = yield from self._scanner.take_while(WHITE_SPACE)
        mark = yield from self._scanner.at(self._openings())
        if (yield from self._calls_here(calls)):
            return True
        self._scanner.go_to(0)
        otherwise(self._scanner.take(len(space) + len(mark or "")))
        self._scanner.lift_anchor()
        return False

    def _calls_here(self, calls: CallFormat) -> Reading[bool]:
        if (yield from self._scanner.take_mark(marks_of(*calls.section_opened))) is not None:
            self._is_in_section = True
            yield from self._scanner.take_while(WHITE_SPACE)
        num_before = self._num_calls
        while (yield from self._call(calls)):
            self._scanner.set_anchor()
            yield from self._scanner.take_while(WHITE_SPACE + calls.between)
        if self._num_calls == num_before:
            return False
        self._scanner.go_to(0)
        self._scanner.lift_anchor()
        return True

    def _call(self, calls: CallFormat) -> Reading[bool]:
        """From its mark to its end."""
        if calls.opened:
            if (yield from self._scanner.take_mark(marks_of(*calls.opened))) is None:
                return False
            yield from self._scanner.take_while(WHITE_SPACE)
        if not (yield from self._json_call(marks_of(*calls.closed))):
            return False
        yield from self._scanner.take_while(WHITE_SPACE)
        yield from self._scanner.take_mark(marks_of(*calls.closed))
        return True

    def _json_call(self, closed: Marks) -> Reading[bool]:
        """`{"name": ..., "arguments": ...}` in any order."""
        if (yield from self._scanner.char()) != "{":
            return False
        self._scanner.take(1)
        index: int | None = None
        call_id: str | None = None
        early: list[str] = []
        has_arguments = False
        while True:
            key = yield from self._json_key()
            if key is None or (index is None and key not in (NAME_KEY, *KEYS_BEFORE_NAME)):
                break
            if key in ARGUMENT_KEYS and not has_arguments:
                write = early.append if index is None else self._argument_writer(index)
                has_arguments = True
                if not (yield from self._json_arguments(write)):
                    if index is None:
                        return False
                    yield from self._broken(closed, index)
                    return True
            else:
                value: list[str] = []
                if not (yield from read_value(self._scanner, JSON, value.append)):
                    break
                decoded = _decoded("".join(value))
                if key == NAME_KEY and index is None:
                    if decoded not in self._tools:
                        return False
                    index = self._begin(decoded, call_id)
                    for text in early:
                        self._argue(index, text)
                elif key == "id" and isinstance(decoded, str):
                    call_id = decoded
        if index is None:
            return False
        if not has_arguments:
            self._argue(index, "{}")
        yield from self._scanner.take_while(WHITE_SPACE)
        yield from self._scanner.take_while("}")
        self._events.append(CallEnded(index))
        return True

    def _json_key(self) -> Reading[str | None]:
        """And the colon after it."""
        yield from self._scanner.take_while(WHITE_SPACE + ",")
        if (yield from self._scanner.char()) != '"':
            return None
        key: list[str] = []
        if not (yield from read_value(self._scanner, JSON, key.append)):
            return None
        yield from self._scanner.take_while(WHITE_SPACE)
        if (yield from self._scanner.char()) != ":":
            return None
        self._scanner.take(1)
        yield from self._scanner.take_while(WHITE_SPACE)
        return str(_decoded("".join(key)))

    def _json_arguments(self, write: Write) -> Reading[bool]:
        return (yield from read_value(self._scanner, JSON, write))

    def _broken(self, closed: Marks, index: int) -> Reading[None]:
        """The rest of arguments that are no JSON, as it stands."""
        yield from self._scanner.take_until(closed, self._argument_writer(index))
        self._events.append(CallEnded(index))

    # Events.

    def _begin(self, name: str, call_id: str | None) -> int:
        self._scanner.lift_anchor()
        self._events.append(CallBegun(self._num_calls, name, call_id))
        self._num_calls += 1
        return self._num_calls - 1

    def _argument_writer(self, index: int) -> Write:
        return lambda text: self._argue(index, text)

    def _argue(self, index: int, text: str) -> None:
        match self._events[-1:]:
            case [Arguments(text=before)]:
                self._events[-1] = Arguments(index, before + text)
            case _ if text:
                self._events.append(Arguments(index, text))

    def _say(self, text: str) -> None:
        match self._events[-1:]:
            case [Content(text=before)]:
                self._events[-1] = Content(before + text)
            case _ if text:
                self._events.append(Content(text))

    def _think(self, text: str) -> None:
        match self._events[-1:]:
            case [Reasoning(text=before)]:
                self._events[-1] = Reasoning(before + text)
            case _ if text:
                self._events.append(Reasoning(text))


def _decoded(text: str) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None


def is_thought_open(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Whether a prompt, or its last part, ends within a thought."""
    _, mark, rest = prompt.rpartition(reasoning.opened)
    return bool(mark) and reasoning.closed not in rest and not any(turn in rest for turn in TURN_MARKS)
