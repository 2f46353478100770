"""Calls between marks: sections of calls, lists of calls, single calls."""

from collections.abc import Mapping
from typing import Any

from kvasir_runtime.talk.events import EventWriter
from kvasir_runtime.talk.format import CallFormat, JsonCall, NamedCall
from kvasir_runtime.talk.json_calls import JsonCallReader
from kvasir_runtime.talk.named_calls import NamedCallReader
from kvasir_runtime.talk.scanner import WHITE_SPACE, Marks, Reading, Scanner, Write, marks_of


class CallReader:
    def __init__(self, scanner: Scanner, events: EventWriter, calls: CallFormat, tools: Mapping[str, Any]) -> None:
        self._scanner = scanner
        self._events = events
        self._calls = calls
        self._tools = tools
        self._names = Marks(tools)
        self._is_in_section = False
        befores = [mark for body in calls.bodies if isinstance(body, NamedCall) for mark in body.before if mark]
        has_befores = calls.is_opened_optional or not calls.opened
        self.openings = (*calls.section_opened, *calls.opened, *(befores if has_befores else ()))
        self._ends = marks_of(*calls.closed, *calls.section_closed, *self.openings)

    @property
    def marks(self) -> tuple[str, ...]:
        """At which to try, as the answer stands."""
        return (*self.openings, *self._calls.section_closed) if self._is_in_section else self.openings

    def read_bare(self) -> Reading[None]:
        """Calls without a mark, if there are some."""
        self._scanner.set_anchor()
        yield from self._scanner.take_while(WHITE_SPACE)
        char = yield from self._scanner.char()
        is_begun = bool(char) and char in self._calls.bare
        if not is_begun or not (yield from self._read_calls()):
            self._scanner.go_to(0)
            self._scanner.lift_anchor()

    def read(self, otherwise: Write) -> Reading[bool]:
        """At white space and one of the marks. What is no call is handed on, as far as the first mark."""
        if self._is_in_section and (yield from self._end_section()):
            return True
        self._scanner.set_anchor()
        if (yield from self._read_calls()):
            return True
        self._scanner.go_to(0)
        space = yield from self._scanner.take_while(WHITE_SPACE)
        mark = yield from self._scanner.take_mark(marks_of(*self.openings))
        self._scanner.lift_anchor()
        otherwise(space + (mark or ""))
        return False

    def _read_calls(self) -> Reading[bool]:
        is_any = False
        while (yield from self._read_call()):
            is_any = True
            self._scanner.set_anchor()
        if is_any:
            self._scanner.go_to(0)
            self._scanner.lift_anchor()
        return is_any

    def _read_call(self) -> Reading[bool]:
        """With what stands before and after it."""
        yield from self._scanner.take_while(WHITE_SPACE + self._calls.between)
        section = yield from self._scanner.take_mark(marks_of(*self._calls.section_opened))
        yield from self._scanner.take_while(WHITE_SPACE)
        if self._calls.opened:
            mark = yield from self._scanner.take_mark(marks_of(*self._calls.opened))
            if mark is None and not self._calls.is_opened_optional:
                return False
            yield from self._scanner.take_while(WHITE_SPACE)
        if not (yield from self._read_bodies()):
            return False
        self._is_in_section = self._is_in_section or section is not None
        yield from self._take_closing(self._calls.closed)
        yield from self._end_section()
        return True

    def _read_bodies(self) -> Reading[bool]:
        if (yield from self._scanner.char()) != "[":
            return (yield from self._read_body())
        self._scanner.take(1)
        yield from self._scanner.take_while(WHITE_SPACE)
        if not (yield from self._read_body()):
            return False
        while (yield from self._read_next_in_list()):
            pass
        return True

    def _read_next_in_list(self) -> Reading[bool]:
        self._scanner.set_anchor()
        yield from self._scanner.take_while(WHITE_SPACE)
        char = yield from self._scanner.char()
        self._scanner.take(1)
        if char == "," and (yield from self._read_after_comma()):
            return True
        if char != "]":
            self._scanner.go_to(0)
        self._scanner.lift_anchor()
        return False

    def _read_after_comma(self) -> Reading[bool]:
        yield from self._scanner.take_while(WHITE_SPACE)
        return (yield from self._read_body())

    def _read_body(self) -> Reading[bool]:
        start = self._scanner.offset
        for body in self._calls.bodies:
            match body:
                case JsonCall():
                    reading = JsonCallReader(self._scanner, self._events, self._names, self._ends).read()
                case NamedCall():
                    reading = NamedCallReader(
                        self._scanner, self._events, self._names, self._ends, body, self._tools
                    ).read()
            if (yield from reading):
                if isinstance(body, NamedCall):
                    yield from self._take_closing(body.closed)
                return True
            self._scanner.go_to(start)
        return False

    def _end_section(self) -> Reading[bool]:
        is_ended = yield from self._take_closing(self._calls.section_closed)
        if is_ended:
            self._is_in_section = False
        return is_ended

    def _take_closing(self, marks: tuple[str, ...]) -> Reading[bool]:
        """And white space before it, if it is there."""
        if not marks:
            return False
        self._scanner.set_anchor()
        yield from self._scanner.take_while(WHITE_SPACE)
        is_there = (yield from self._scanner.take_mark(marks_of(*marks))) is not None
        if not is_there:
            self._scanner.go_to(0)
        self._scanner.lift_anchor()
        return is_there
