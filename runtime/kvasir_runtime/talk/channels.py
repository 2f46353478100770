"""Answers that are messages with headers: thoughts, text and calls on channels (Harmony)."""

import re
from collections.abc import Mapping
from typing import Any

from kvasir_runtime.talk.events import EventWriter
from kvasir_runtime.talk.format import Channels
from kvasir_runtime.talk.literals import JSON, read_value
from kvasir_runtime.talk.scanner import WHITE_SPACE, Reading, Scanner, Write, marks_of


class ChannelReader:
    """`has_thoughts`: they are told apart from text."""

    def __init__(
        self,
        scanner: Scanner,
        events: EventWriter,
        channels: Channels,
        tools: Mapping[str, Any],
        *,
        has_thoughts: bool,
    ) -> None:
        self._scanner = scanner
        self._events = events
        self._channels = channels
        self._tools = tools
        self._has_thoughts = has_thoughts
        self._last: Write | None = None
        headers = (channels.started, channels.channel, channels.constrained, channels.message)
        self._header_begun = marks_of(*headers, "to=")
        self._any = marks_of(*headers, *channels.ended)
        self._ends = marks_of(*channels.ended, channels.started)
        self._channel = re.compile(re.escape(channels.channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"\bto=([^\s<]+)")

    def read(self) -> Reading[None]:
        while (yield from self._scanner.char()):
            self._scanner.set_anchor()
            yield from self._scanner.take_while(WHITE_SPACE)
            is_header = (yield from self._scanner.at(self._header_begun)) is not None
            self._scanner.go_to(0)
            if is_header:
                yield from self._read_message()
            else:
                self._scanner.lift_anchor()
                yield from self._read_text(self._events.say)

    def _read_message(self) -> Reading[None]:
        pieces: list[str] = []
        mark = yield from self._scanner.take_until(marks_of(self._channels.message), pieces.append)
        header = "".join(pieces)
        self._scanner.lift_anchor()
        if mark is None:
            self._events.say(header)
            return
        self._scanner.take(len(mark))
        channel = self._channel.search(header)
        recipient = self._recipient.search(header)
        is_thought = self._has_thoughts and channel is not None and channel[1] == self._channels.reasoning
        write = self._events.think if is_thought else self._events.say
        name = recipient[1].removeprefix(self._channels.tool_prefix) if recipient else None
        if name is not None and name in self._tools:
            yield from self._read_call(name)
            return
        if name is not None and name != "user":
            write(header + mark)
        yield from self._read_text(self._apart(write))

    def _apart(self, write: Write) -> Write:
        """Messages of one kind that follow each other are lines of their own."""
        is_same, self._last = self._last == write, write
        return _after_newline(write) if is_same else write

    def _read_text(self, write: Write) -> Reading[None]:
        mark = yield from self._scanner.take_until(self._ends, write)
        if mark in self._channels.ended:
            self._scanner.take(len(mark))

    def _read_call(self, name: str) -> Reading[None]:
        self._events.begin_call(name, None)
        self._last = None
        yield from self._scanner.take_while(WHITE_SPACE)
        is_absent = (yield from self._scanner.at(self._ends)) is not None
        if is_absent:
            self._events.argue("{}")
        if is_absent or (yield from read_value(self._scanner, JSON, self._events.argue)):
            self._events.end_call()
            yield from self._scanner.take_while(WHITE_SPACE)
            yield from self._read_text(self._events.say)
            return
        mark = yield from self._scanner.take_until(self._ends, self._events.argue)
        if mark is not None:
            self._events.end_call()
            yield from self._read_text(self._events.say)


def _after_newline(write: Write) -> Write:
    newline = "\n"

    def write_line(text: str) -> None:
        nonlocal newline
        write(newline + text)
        newline = ""

    return write_line
