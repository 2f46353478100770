"""Values without quotes, typed by a tool's schema: each is made JSON as it comes, as far as its beginning tells what it
will be."""

import json
import re
from typing import Any, Final

from kvasir_runtime.talk.literals import JSON_OR_PYTHON, ValueReader, escaped, read_value
from kvasir_runtime.talk.scanner import Reading, Scanner, Write

JSON_VALUE: Final = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})
"""Any, whose text is in quotes."""
TEXT: Final = frozenset({"string"})
_BRACKETS: Final = {"{": "object", "[": "array"}
_NUMBER_BEGUN: Final = re.compile(r"-?[0-9]*\.?[0-9]*(?:[eE][+-]?[0-9]*)?\s*")
_WORDS: Final = {
    "null": ("null", "none"),
    "boolean": ("true", "false"),
}


class ParameterValue:
    """One that comes in pieces. What is of none of its types is text."""

    def __init__(self, types: frozenset[str], write: Write) -> None:
        self._types = types or TEXT
        self._write = write
        self._held = ""
        self._scanner: Scanner | None = None
        self._reader: ValueReader | None = None
        self._reading: Reading[bool] | None = None
        self._is_text = False

    def add(self, text: str) -> None:
        if self._is_text:
            self._write(escaped(text))
        elif self._scanner is not None:
            self._scanner.add(text)
            self._read_on()
        else:
            self._held += text
            self._decide()

    @property
    def is_in_string(self) -> bool:
        """Of JSON: what looks like the value's end is text."""
        return self._reader is not None and self._reader.is_in_string

    def end(self) -> None:
        if self._is_text:
            self._write('"')
        elif self._scanner is not None:
            self._scanner.end(is_cut=False)
            self._read_on()
        else:
            self._write(as_json(self._held, self._types))

    def cut(self) -> None:
        """What is held is no whole value."""
        self._write(self._held)
        self._held = ""
        if self._scanner is not None:
            self._scanner.end(is_cut=True)
            self._read_on()

    def _decide(self) -> None:
        begun = self._held.lstrip()
        if begun and self._is_json(begun):
            self._scanner = Scanner()
            self._reader = ValueReader(self._scanner, JSON_OR_PYTHON, self._write)
            self._reading = self._read(self._scanner, self._reader)
            self._scanner.add(begun)
            self._held = ""
            self._read_on()
        elif self._types == TEXT or (begun and "string" in self._types and not _may_be_other(begun, self._types)):
            self._is_text = True
            self._write('"' + escaped(self._held))
            self._held = ""

    def _is_json(self, begun: str) -> bool:
        """Whether a beginning tells so already."""
        if self._types == JSON_VALUE:
            return begun[0] in '{["'
        return "string" not in self._types and _BRACKETS.get(begun[0]) in self._types

    def _read(self, scanner: Scanner, reader: ValueReader) -> Reading[bool]:
        yield from reader.read(None)
        while rest := (yield from scanner.char()):
            self._write(scanner.take(len(rest)))
        return True

    def _read_on(self) -> None:
        if self._reading is not None:
            next(self._reading, None)


def _may_be_other(begun: str, types: frozenset[str]) -> bool:
    """Whether what begins so may come to be of a type that is not text."""
    if types & {"integer", "number"} and _NUMBER_BEGUN.fullmatch(begun):
        return True
    word = begun.rstrip().lower()
    if any(each.startswith(word) for name, words in _WORDS.items() if name in types for each in words):
        return True
    if "boolean" in types and word in ("0", "1"):
        return True
    return _BRACKETS.get(begun[0]) in types


def as_json(text: str, types: frozenset[str]) -> str:
    """A whole value as JSON: of the first of its types that it can be, else text."""
    bare = text.strip()
    if "null" in types and bare.lower() in _WORDS["null"]:
        return "null"
    value, spelled = _read_whole(bare)
    if types & {"integer", "number"} and type(value) in (int, float):
        is_whole = isinstance(value, int) or value.is_integer()
        if "number" in types or is_whole:
            return spelled
    if "boolean" in types and bare.lower() in ("true", "false", "0", "1"):
        return "true" if bare.lower() in ("true", "1") else "false"
    if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
        return spelled
    return f'"{escaped(text)}"'


def _read_whole(text: str) -> tuple[Any, str]:
    """A value and its JSON; else None."""
    scanner, pieces = Scanner(), list[str]()
    scanner.add(text)
    scanner.end(is_cut=False)
    for _ in read_value(scanner, JSON_OR_PYTHON, pieces.append):
        pass
    spelled = "".join(pieces)
    try:
        return (None, "") if scanner.take(1) else (json.loads(spelled), spelled)
    except ValueError:
        return None, ""
