"""Values as models write them in arguments, handed on as JSON piece by piece.

JSON stays as it was written. Other spellings (Python's, or with marks for quotes) become JSON. What cannot belong to
the value ends the reading: nothing is mended, and nothing is left out.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from kvasir_runtime.talk.scanner import WHITE_SPACE, Reading, Scanner, Write, marks_of

_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD_CHARS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-."
_PLAIN: Final = {quote: re.compile(rf"[^{quote}\\]+") for quote in ('"', "'")}
_JSON_WORDS: Final = {"true": "true", "false": "false", "null": "null"}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": ""
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

    quotes: tuple[str, ...] = ('"',)
    raw_quotes: tuple[str, ...] = ()
    """Between them nothing is escaped."""
    words: dict[str, str] = field(default_factory=lambda: _JSON_WORDS)
    brackets: tuple[Brackets, ...] = (OBJECT, LIST)
    has_bare_keys: bool = False
    is_python: bool = False
    """Python's escapes and numbers, and a comma may stand before a closing bracket."""


JSON: Final = Literals()
PYTHON: Final = Literals(
    quotes=('"', "'"),
    words=_JSON_WORDS | {"True": "true", "False": "false", "None": "null"},
    brackets=(OBJECT, LIST, TUPLE),
    has_bare_keys=True,
    is_python=True,
)


class _State:
    """What may come next."""

    VALUE = "value"
    FIRST_VALUE = "value or end"
    KEY = "key"
    FIRST_KEY = "key or end"
    SEPARATOR = "separator"
    NEXT = "comma or end"


def read_value(scanner: Scanner, literals: Literals, write: Write, within: Brackets | None = None) -> Reading[bool]:
    """One value, or what stands in brackets that the scanner is at. Whether it came to its end; else the scanner
    stands at what cannot belong to it."""
    reader = _Reader(scanner, literals, write)
    return (yield from reader.read(within))


class _Reader:
    def __init__(self, scanner: Scanner, literals: Literals, write: Write) -> None:
        self._scanner = scanner
        self._literals = literals
        self._write = write
        self._open: list[Brackets] = []
        self._expected = _State.VALUE
        self._comma = ""
        """And white space after it; held, since in some spellings it means nothing before a bracket."""
        self._quotes = marks_of(*literals.quotes, *literals.raw_quotes)

    def read(self, within: Brackets | None) -> Reading[bool]:
        if within is not None:
            self._enter(within)
        while True:
            char = yield from self._scanner.char()
            if char and char in WHITE_SPACE:
                self._space(self._scanner.take(1))
                continue
            is_read = bool(char) and (yield from self._step(char))
            if not is_read:
                self._flush()
                return False
            if not self._open and self._expected == _State.NEXT:
                return True

    def _space(self, char: str) -> None:
        if self._comma:
            self._comma += char
        else:
            self._write(char)

    def _flush(self) -> None:
        if self._comma:
            self._write(self._comma)
            self._comma = ""

    def _step(self, char: str) -> Reading[bool]:
        if self._open and char == self._open[-1].closed:
            return self._leave()
        match self._expected:
            case _State.VALUE | _State.FIRST_VALUE:
                self._flush()
                return (yield from self._value(char))
            case _State.KEY | _State.FIRST_KEY:
                self._flush()
                return (yield from self._key())
            case _State.SEPARATOR:
                return self._separator(char)
        return self._next(char)

    def _enter(self, brackets: Brackets) -> None:
        self._scanner.take(len(brackets.opened))
        self._open.append(brackets)
        self._write(brackets.json[0])
        self._expected = _State.FIRST_VALUE if brackets.separator is None else _State.FIRST_KEY

    def _leave(self) -> bool:
        is_after_comma = self._expected in (_State.VALUE, _State.KEY) and self._comma and self._literals.is_python
        if self._expected not in (_State.FIRST_VALUE, _State.FIRST_KEY, _State.NEXT) and not is_after_comma:
            return False
        self._comma = ""
        self._scanner.take(1)
        self._write(self._open.pop().json[1])
        self._expected = _State.NEXT
        return True

    def _value(self, char: str) -> Reading[bool]:
        for brackets in self._literals.brackets:
            if char == brackets.opened:
                self._enter(brackets)
                return True
        quote = yield from self._scanner.take_mark(self._quotes)
        self._expected = _State.NEXT
        if quote is not None:
            return (yield from self._string(quote))
        word = yield from self._scanner.take_while(_WORD_CHARS)
        spelled = self._spelled(word)
        self._write(word if spelled is None else spelled)
        return spelled is not None

    def _key(self) -> Reading[bool]:
        quote = yield from self._scanner.take_mark(self._quotes)
        self._expected = _State.SEPARATOR
        if quote is not None:
            return (yield from self._string(quote))
        if not self._literals.has_bare_keys:
            return False
        word = yield from self._scanner.take_while(_WORD_CHARS)
        if word:
            self._write(f'"{word}"')
        return bool(word)

    def _separator(self, char: str) -> bool:
        if char != self._open[-1].separator:
            return False
        self._scanner.take(1)
        self._write(":" if char == ":" else ": ")
        self._expected = _State.VALUE
        return True

    def _next(self, char: str) -> bool:
        if char != "," or not self._open:
            return False
        self._comma = self._scanner.take(1)
        self._expected = _State.VALUE if self._open[-1].separator is None else _State.KEY
        return True

    def _spelled(self, word: str) -> str | None:
        if _NUMBER.fullmatch(word):
            return word
        if word in self._literals.words:
            return self._literals.words[word]
        return _python_number(word) if self._literals.is_python else None

    def _string(self, quote: str) -> Reading[bool]:
        self._write('"')
        if quote in self._literals.raw_quotes:
            is_closed = yield from self._raw_text(quote)
        else:
            is_closed = yield from self._text(quote)
        if is_closed:
            self._write('"')
        return is_closed

    def _raw_text(self, quote: str) -> Reading[bool]:
        mark = yield from self._scanner.take_until(marks_of(quote), lambda text: self._write(escaped(text)))
        if mark is not None:
            self._scanner.take(len(mark))
        return mark is not None

    def _text(self, quote: str) -> Reading[bool]:
        is_json = quote == '"' and not self._literals.is_python
        while True:
            plain = self._scanner.take_matching(_PLAIN[quote])
            if plain:
                self._write(plain if is_json else escaped(plain))
            char = yield from self._scanner.char()
            if char == quote:
                self._scanner.take(1)
                return True
            if char == "\\":
                if len((yield from self._scanner.chars(2))) < 2:
                    return False
                yield from self._escape(is_json)
            elif not char:
                return False

    def _escape(self, is_json: bool) -> Reading[None]:
        kind = (yield from self._scanner.chars(2))[1]
        if is_json or kind == "u":
            self._write(self._scanner.take(2))
        elif kind in _ESCAPES:
            self._scanner.take(2)
            self._write(escaped(_ESCAPES[kind]))
        elif kind in _HEX_DIGITS:
            written = yield from self._scanner.chars(2 + _HEX_DIGITS[kind])
            self._write(escaped(_character(self._scanner.take(len(written)))))
        else:
            self._write(escaped(self._scanner.take(2)))


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
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (SyntaxError, ValueError):
        return None
