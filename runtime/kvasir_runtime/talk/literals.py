"""Values as models write them in arguments, handed on as JSON piece by piece.

JSON stays as it was written. Other spellings (Python's, or with marks for quotes) become JSON. What cannot belong to
the value ends the reading: nothing is mended, and nothing is left out.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from kvasir_runtime.talk.scanner import WHITE_SPACE, Reading, Scanner, Write, marks_of

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD: Final = re.compile(r"[\w+\-.]*")
_BARE_KEY: Final = re.compile(r"[^\s:=,(){}\[\]\"']*")
_BARE_STRING: Final = re.compile(r"[^,{}\[\]]*")
_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\]+") for quote in ('"', "'")}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_HEX_DIGITS: Final = {"x": 2, "U": 8}


@dataclass(frozen=True, slots=True)
class Brackets:
    opened: str
    closed: str
    separator: str | None
    """Between key and value; None: a list."""

    @property
    def json(self) -> str:
        return "[]" if self.separator is None else "{}"


OBJECT: Final = Brackets("{", "}", ":")
LIST: Final = Brackets("[", "]", None)
TUPLE: Final = Brackets("(", ")", None)
KEYWORDS: Final = Brackets("(", ")", "=")


@dataclass(frozen=True, slots=True)
class Literals:
    """A spelling of values."""

    words: Mapping[str, str]
    """What stands for true, false and null."""
    quotes: tuple[str, ...] = ('"',)
    """Of strings with JSON's escapes."""
    python_quotes: tuple[str, ...] = ()
    """Of strings with Python's escapes."""
    raw_quotes: tuple[str, ...] = ()
    """Of strings without escapes."""
    brackets: tuple[Brackets, ...] = (OBJECT, LIST)
    has_bare_keys: bool = False
    has_bare_strings: bool = False
    """What is no number and no word is a string, up to the next comma or bracket."""
    is_python: bool = False
    """Python's numbers too, and a comma may stand before a closing bracket."""


JSON: Final = Literals({"true": "true", "false": "false", "null": "null"})
_PYTHON_WORDS: Final = {**JSON.words, "True": "true", "False": "false", "None": "null"}
JSON_OR_PYTHON: Final = Literals(_PYTHON_WORDS, python_quotes=("'",), is_python=True)
PYTHON: Final = Literals(
    _PYTHON_WORDS,
    quotes=(),
    python_quotes=('"', "'"),
    brackets=(OBJECT, LIST, TUPLE),
    has_bare_keys=True,
    is_python=True,
)


class _Expected(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    """Or a closing bracket."""
    KEY = auto()
    FIRST_KEY = auto()
    """Or a closing bracket."""
    SEPARATOR = auto()
    COMMA = auto()
    """Or a closing bracket, or nothing more."""


def read_value(scanner: Scanner, literals: Literals, write: Write, within: Brackets | None = None) -> Reading[bool]:
    """One value, or what stands in brackets that the scanner is at. Whether it came to its end; else the scanner
    stands at what cannot belong to it."""
    return (yield from ValueReader(scanner, literals, write).read(within))


class ValueReader:
    """Of one value."""

    def __init__(self, scanner: Scanner, literals: Literals, write: Write) -> None:
        self._scanner = scanner
        self._literals = literals
        self._write = write
        self._quotes = marks_of(*literals.quotes, *literals.python_quotes, *literals.raw_quotes)
        self._open: list[Brackets] = []
        self._expected = _Expected.VALUE
        self.is_in_string = False
        self._comma = ""
        """And white space after it; held, since Python's may stand before a closing bracket."""

    def read(self, within: Brackets | None) -> Reading[bool]:
        if within is not None:
            self._enter(within)
        while True:
            char = yield from self._scanner.char()
            if char and char in WHITE_SPACE:
                self._write_space(self._scanner.take(1))
                continue
            is_read = bool(char) and (yield from self._read_at(char))
            if not is_read:
                self._write_comma()
                return False
            if not self._open and self._expected is _Expected.COMMA:
                return True

    def _read_at(self, char: str) -> Reading[bool]:
        if self._open and char == self._open[-1].closed:
            return self._leave()
        match self._expected:
            case _Expected.VALUE | _Expected.FIRST_VALUE:
                self._write_comma()
                return (yield from self._read_value(char))
            case _Expected.KEY | _Expected.FIRST_KEY:
                self._write_comma()
                return (yield from self._read_key())
            case _Expected.SEPARATOR:
                return self._take_separator(char)
        return self._take_comma(char)

    def _write_space(self, char: str) -> None:
        if self._comma:
            self._comma += char
        else:
            self._write(char)

    def _write_comma(self) -> None:
        if self._comma:
            self._write(self._comma)
            self._comma = ""

    def _enter(self, brackets: Brackets) -> None:
        self._scanner.take(len(brackets.opened))
        self._open.append(brackets)
        self._write(brackets.json[0])
        self._expected = _Expected.FIRST_VALUE if brackets.separator is None else _Expected.FIRST_KEY

    def _leave(self) -> bool:
        may_leave = self._expected in (_Expected.FIRST_VALUE, _Expected.FIRST_KEY, _Expected.COMMA)
        if not may_leave and not (self._comma and self._literals.is_python):
            return False
        self._comma = ""
        self._scanner.take(1)
        self._write(self._open.pop().json[1])
        self._expected = _Expected.COMMA
        return True

    def _take_separator(self, char: str) -> bool:
        if char != self._open[-1].separator:
            return False
        self._scanner.take(1)
        self._write(":" if char == ":" else ": ")
        self._expected = _Expected.VALUE
        return True

    def _take_comma(self, char: str) -> bool:
        if char != "," or not self._open:
            return False
        self._comma = self._scanner.take(1)
        self._expected = _Expected.VALUE if self._open[-1].separator is None else _Expected.KEY
        return True

    def _read_key(self) -> Reading[bool]:
        self._expected = _Expected.SEPARATOR
        quote = yield from self._scanner.take_mark(self._quotes)
        if quote is not None:
            return (yield from self._read_string(quote))
        if not self._literals.has_bare_keys:
            return False
        key = yield from self._scanner.take_run(_BARE_KEY)
        if key:
            self._write(f'"{escaped(key)}"')
        return bool(key)

    def _read_value(self, char: str) -> Reading[bool]:
        for brackets in self._literals.brackets:
            if char == brackets.opened:
                self._enter(brackets)
                return True
        self._expected = _Expected.COMMA
        quote = yield from self._scanner.take_mark(self._quotes)
        if quote is not None:
            return (yield from self._read_string(quote))
        if self._literals.has_bare_strings:
            word = (yield from self._scanner.take_run(_BARE_STRING)).rstrip()
            self._write(self._spelled(word) or f'"{escaped(word)}"')
            return bool(word)
        word = yield from self._scanner.take_run(_WORD)
        spelled = self._spelled(word)
        self._write(word if spelled is None else spelled)
        return spelled is not None

    def _spelled(self, word: str) -> str | None:
        """None: it is neither a number nor a word that stands for something."""
        if _NUMBER.fullmatch(word):
            return word
        if word in self._literals.words:
            return self._literals.words[word]
        return _python_number(word) if self._literals.is_python else None

    def _read_string(self, quote: str) -> Reading[bool]:
        self._write('"')
        self.is_in_string = True
        if quote in self._literals.raw_quotes:
            is_closed = yield from self._read_raw(quote)
        else:
            is_closed = yield from self._read_escaped(quote)
        self.is_in_string = False
        if is_closed:
            self._write('"')
        return is_closed

    def _read_raw(self, quote: str) -> Reading[bool]:
        mark = yield from self._scanner.take_until(marks_of(quote), lambda text: self._write(escaped(text)))
        self._scanner.take(len(mark or ""))
        return mark is not None

    def _read_escaped(self, quote: str) -> Reading[bool]:
        is_python = quote in self._literals.python_quotes
        while True:
            plain = self._scanner.take_there(_PLAIN[quote])
            if plain:
                self._write(escaped(plain) if is_python else plain)
            char = yield from self._scanner.char()
            if char == quote:
                self._scanner.take(1)
                return True
            if char == "\\":
                yield from self._read_escape(is_python)
            elif not char:
                return False

    def _read_escape(self, is_python: bool) -> Reading[None]:
        kind = (yield from self._scanner.chars(2))[1:]
        if not is_python or kind in ("u", ""):
            self._write(self._scanner.take(2))
        elif kind in _ESCAPES:
            self._scanner.take(2)
            self._write(escaped(_ESCAPES[kind]))
        else:
            written = yield from self._scanner.chars(2 + _HEX_DIGITS.get(kind, 0))
            self._write(escaped(_character(self._scanner.take(len(written)))))


def escaped(text: str) -> str:
    """As it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _character(escape: str) -> str:
    try:
        return chr(int(escape[2:], 16))
    except (ValueError, OverflowError):
        return escape


def _python_number(word: str) -> str | None:
    try:
        value: Any = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False) if type(value) in (int, float) else None
    except (SyntaxError, ValueError):
        return None
