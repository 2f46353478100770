"""Calls that are JSON: `{"name": NAME, "arguments": {...}}`, in any order. The arguments stream as they are written."""

import json
from typing import Any, Final

from kvasir_runtime.talk.events import EventWriter
from kvasir_runtime.talk.literals import JSON, read_value
from kvasir_runtime.talk.scanner import WHITE_SPACE, Marks, Reading, Scanner

ARGUMENT_KEYS: Final = ("arguments", "parameters")
KEYS_BEFORE_NAME: Final = ("name", "id", "type", "function", *ARGUMENT_KEYS)
"""An object with another key before its name is no call: so that an answer in JSON need not be held back."""


class JsonCallReader:
    """Of one call."""

    def __init__(self, scanner: Scanner, events: EventWriter, names: Marks, ends: Marks) -> None:
        self._scanner = scanner
        self._events = events
        self._names = names.marks
        self._ends = ends
        self._is_begun = False
        self._call_id: str | None = None
        self._early_arguments: list[str] = []
        """That stand before the name."""
        self._has_arguments = False

    def read(self) -> Reading[bool]:
        """Whether it was one; if so, its beginning has been told."""
        if (yield from self._scanner.char()) != "{":
            return False
        self._scanner.take(1)
        while (key := (yield from self._read_key())) is not None:
            if not self._is_begun and key not in KEYS_BEFORE_NAME:
                return False
            char = yield from self._scanner.char()
            if key == "function" and char == "{":
                self._scanner.take(1)
            elif key in ARGUMENT_KEYS and not self._has_arguments:
                if not (yield from self._read_arguments(char)):
                    return self._is_begun
            elif not (yield from self._read_other(key)):
                break
        if self._is_begun:
            yield from self._close()
        return self._is_begun

    def _read_key(self) -> Reading[str | None]:
        """And the colon after it."""
        yield from self._scanner.take_while(WHITE_SPACE + ",")
        if (yield from self._scanner.char()) != '"':
            return None
        key: list[str] = []
        yield from read_value(self._scanner, JSON, key.append)
        yield from self._scanner.take_while(WHITE_SPACE)
        if (yield from self._scanner.char()) != ":":
            return None
        self._scanner.take(1)
        yield from self._scanner.take_while(WHITE_SPACE)
        return str(_decoded("".join(key)))

    def _read_other(self, key: str) -> Reading[bool]:
        text: list[str] = []
        is_whole = yield from read_value(self._scanner, JSON, text.append)
        value = _decoded("".join(text))
        if key == "id" and isinstance(value, str):
            self._call_id = value
        elif key == "name" and not self._is_begun:
            if value not in self._names:
                return False
            self._begin(value)
        return is_whole

    def _begin(self, name: str) -> None:
        self._is_begun = True
        self._scanner.lift_anchor()
        self._events.begin_call(name, self._call_id)
        self._events.argue("".join(self._early_arguments))

    def _read_arguments(self, char: str) -> Reading[bool]:
        """False: they are broken, and all of them has been read."""
        self._has_arguments = True
        if char == '"' or char == "n":
            is_whole = yield from self._read_wrapped()
        else:
            is_whole = yield from read_value(self._scanner, JSON, self._argue)
        if not is_whole and self._is_begun:
            yield from self._read_broken()
        return is_whole

    def _argue(self, text: str) -> None:
        if self._is_begun:
            self._events.argue(text)
        else:
            self._early_arguments.append(text)

    def _read_wrapped(self) -> Reading[bool]:
        """Arguments whose JSON is text within JSON; or null, which is none."""
        text: list[str] = []
        is_whole = yield from read_value(self._scanner, JSON, text.append)
        if is_whole:
            self._argue(_decoded("".join(text)) or "{}")
        else:
            self._argue("".join(text))
        return is_whole

    def _read_broken(self) -> Reading[None]:
        """As they are, but for the call's own bracket."""
        mark = yield from self._scanner.take_until(self._ends, self._events.argue, held=WHITE_SPACE + "}")
        rest = yield from self._scanner.take_while(WHITE_SPACE + "}")
        if mark is None:
            self._events.argue(rest)
        else:
            self._events.argue(rest.rstrip(WHITE_SPACE)[:-1])
            self._events.end_call()

    def _close(self) -> Reading[None]:
        char = yield from self._scanner.char()
        if char or self._has_arguments or not self._scanner.is_cut:
            if not self._has_arguments:
                self._events.argue("{}")
            self._events.end_call()
        yield from self._scanner.take_while("}")


def _decoded(text: str) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
