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
        self._header_ended = marks_of(channels.message, *channels.ended)
        self._any = marks_of(*headers, *channels.ended)
        self._ends = marks_of(*channels.ended, channels.started)
        self._channel = re.compile(re.escape(channels.channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"\bto=([^\s<]+)")
        self._recipient_begun = re.compile(r"\s*(?:t|to|to=\S*)?\s*")
        self._named = re.compile(f"(?:{'|'.join(map(re.escape, headers))})\\s*\\w*")

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
        mark = yield from self._scanner.take_until(self._header_ended, pieces.append)
        header = "".join(pieces)
        self._scanner.lift_anchor()
        self._scanner.take(len(mark or ""))
        is_whole = mark == self._channels.message
        channels = self._channel.findall(header)
        recipient = self._recipient.search(header)
        name = recipient[1].removeprefix(self._channels.tool_prefix) if recipient else None
        if is_whole and name is not None and name in self._tools:
            yield from self._read_call(name)
            return
        is_thought = self._has_thoughts and channels[-1:] == [self._channels.reasoning]
        write = self._apart(self._events.think if is_thought else self._events.say)
        if not is_whole:
            self._say_header(header, write)
        elif name is not None and name != "user":
            write(f"{self._words(header).strip()} ")
        if mark not in self._channels.ended:
            yield from self._read_text(write)

    def _say_header(self, header: str, write: Write) -> None:
        """That no message followed: what it has beside what headers have."""
        words = self._words(header)
        if words == header or not self._recipient_begun.fullmatch(words):
            write(words)

    def _words(self, header: str) -> str:
        """Without marks and the names behind them."""
        return self._named.sub("", header)

    def _apart(self, write: Write) -> Write:
        """Messages of one kind that follow each other are lines of their own."""
        is_same, self._last = self._last == write, write
        return _after_newline(write) if is_same else write

    def _read_text(self, write: Write) -> Reading[None]:
        """Up to the next message; marks that stand in it are left out."""
        while True:
            mark = yield from self._scanner.take_until(self._any, write)
            if mark is None or mark in (self._channels.started, self._channels.channel):
                return
            self._scanner.take(len(mark))
            if mark in self._channels.ended:
                return

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
