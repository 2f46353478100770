"""Patterns of JSON Schema, which are ECMA-262's, in the syntax that llguidance reads, which is Rust's.

Where ECMA-262 and Python's `re`, by which many check answers, mean different characters by one escape, those are
allowed that both mean. What a grammar cannot follow, or is read in two ways, is refused with the part.
"""

import re
from collections.abc import Iterator
from typing import Final, NoReturn

from kvasir_runtime.errors import GrammarError

_ANY: Final = r"[^\n\r\x{2028}\x{2029}]"
_SPACES: Final = r"\t\n\x0B\f\r\x20\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_MORE_SPACES: Final = r"\x1C-\x1F\x{85}\x{FEFF}"
_SETS: Final = {
    "d": ("[0-9]", r"\p{Nd}"),
    "D": (r"\P{Nd}", "[^0-9]"),
    "w": ("[0-9A-Za-z_]", r"[_\p{L}\p{N}]"),
    "W": (r"[^_\p{L}\p{N}]", "[^0-9A-Za-z_]"),
    "s": (f"[{_SPACES}]", f"[{_SPACES}{_MORE_SPACES}]"),
    "S": (f"[^{_SPACES}{_MORE_SPACES}]", f"[^{_SPACES}]"),
}
"""Of each escape what both mean by it, and what either does."""
_CONTROLS: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_QUANTIFIER: Final = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}")
_READ_TWICE: Final = re.compile(r"\{,[0-9]*\}")
_LOOK_AROUND: Final = re.compile(r"\(\?<?[=!]")
_GROUP: Final = re.compile(r"\((?:\?:|\?i[:)]|\?<[A-Za-z_$][A-Za-z0-9_$]*>|(?!\?))")
_PROPERTY: Final = re.compile(r"\\[pP]\{[A-Za-z0-9_=]+\}")
_HEX: Final = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\u\{0*([0-9A-Fa-f]{1,6})\}")
_SURROGATES: Final = range(0xD800, 0xE000)
_LAST: Final = 0x10FFFF


class RustPattern(str):
    """In Rust's syntax."""


def rust_pattern(pattern: str) -> RustPattern:
    """Raises GrammarError."""
    return pattern if isinstance(pattern, RustPattern) else RustPattern("".join(_Reader(pattern).parts()))


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parts(self) -> Iterator[str]:
        while self._at < len(self._text):
            match self._text[self._at]:
                case "\\":
                    yield self._escape()
                case "[":
                    yield self._class()
                case "(":
                    yield self._group()
                case "{":
                    yield self._brace()
                case ".":
                    self._at += 1
                    yield _ANY
                case "]" | "}" as closing:
                    self._at += 1
                    yield f"\\{closing}"
                case character:
                    self._at += 1
                    yield character

    def _escape(self) -> str:
        """Outside of classes."""
        letter = self._next_letter()
        if letter in "bB":
            self._refuse(self._text[self._at :][:2], "boundaries of words cannot be followed")
        if letter in "123456789k":
            self._refuse(self._text[self._at :][:2], "what a group matched cannot be asked for again")
        found = self._set(is_wide=False)
        if found is not None:
            return found
        code = self._code()
        if code in _SURROGATES:
            self._refuse(f"\\u{code:04X}", "no text has half of a character")
        return f"\\x{{{code:X}}}"

    def _group(self) -> str:
        if (found := _LOOK_AROUND.match(self._text, self._at)) is not None:
            self._refuse(found[0], "look-around cannot be followed")
        if (found := _GROUP.match(self._text, self._at)) is None:
            self._refuse(self._text[self._at :][:4], "no such group is known")
        self._at = found.end()
        return found[0] if found[0].startswith("(?i") else "(?:"

    def _brace(self) -> str:
        if (found := _READ_TWICE.match(self._text, self._at)) is not None:
            self._refuse(found[0], "some read it as bounds and some as text; write {0,n} or \\{")
        found = _QUANTIFIER.match(self._text, self._at)
        self._at += 1 if found is None else len(found[0])
        return "\\{" if found is None else found[0]

    def _class(self) -> str:
        begin = self._at
        is_negated = self._text.startswith("[^", begin)
        self._at += 1 + is_negated
        items = list(self._items(begin, is_wide=is_negated))
        self._at += 1
        if items:
            return f"[{'^' * is_negated}{''.join(items)}]"
        if is_negated:
            return "(?s:.)"
        self._refuse(self._text[begin : self._at], "nothing matches it")

    def _items(self, begin: int, *, is_wide: bool) -> Iterator[str]:
        while (first := self._item(begin, is_wide=is_wide)) is not None:
            at = self._at
            last = None
            if self._text.startswith("-", at) and not self._text.startswith("-]", at):
                self._at += 1
                last = self._item(begin, is_wide=is_wide)
            if isinstance(first, int) and isinstance(last, int):
                if last < first:
                    self._refuse(self._text[begin : self._at], "a range in it goes backwards")
                yield from _ranges(first, last)
                continue
            self._at = at  # a hyphen beside a set stands for itself
            yield from [first] if isinstance(first, str) else _ranges(first, first)

    def _item(self, begin: int, *, is_wide: bool) -> int | str | None:
        """A character, or a set; None: the class ends here."""
        if self._at >= len(self._text):
            self._refuse(self._text[begin:], "the class has no end")
        if self._text[self._at] == "]":
            return None
        if self._text[self._at] != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        if self._next_letter() == "b":
            self._at += 2
            return 8
        return self._set(is_wide=is_wide) or self._code()

    def _set(self, *, is_wide: bool) -> str | None:
        """What an escape stands for that stands for many characters."""
        letter = self._next_letter()
        if letter in _SETS:
            self._at += 2
            return _SETS[letter][is_wide]
        if (found := _PROPERTY.match(self._text, self._at)) is not None:
            self._at = found.end()
            return found[0]
        return None

    def _code(self) -> int:
        """That of the character that an escape stands for."""
        letter, following = self._next_letter(), self._text[self._at + 2 : self._at + 3]
        if (found := _HEX.match(self._text, self._at)) is not None:
            self._at = found.end()
            return self._paired(int(found[1] or found[2] or found[3], 16))
        if letter == "c" and following.isascii() and following.isalpha():
            self._at += 3
            return ord(following) % 32
        if letter in _CONTROLS or (letter == "0" and not following.isdecimal()):
            self._at += 2
            return _CONTROLS.get(letter, 0)
        if letter.isascii() and letter.isalnum():
            self._refuse(f"\\{letter}", "no such escape is known")
        self._at += 2
        return ord(letter)

    def _paired(self, code: int) -> int:
        """With the other half of a character that is written as two."""
        if code > _LAST:
            self._refuse(f"\\u{{{code:X}}}", "no character has that number")
        found = _HEX.match(self._text, self._at)
        other = int(found[2], 16) if found is not None and found[2] else 0
        if found is None or not (0xD800 <= code < 0xDC00 <= other < 0xE000):
            return code
        self._at = found.end()
        return 0x10000 + ((code - 0xD800) << 10) + (other - 0xDC00)

    def _next_letter(self) -> str:
        if self._at + 1 >= len(self._text):
            self._refuse("\\", "nothing follows it")
        return self._text[self._at + 1]

    def _refuse(self, part: str, why: str) -> NoReturn:
        raise GrammarError(f"{part[:40]!r} in {self._text[:80]!r}: {why}")


def _ranges(first: int, last: int) -> Iterator[str]:
    """Without halves of characters, which no text has."""
    for begin, end in ((first, min(last, _SURROGATES.start - 1)), (max(first, _SURROGATES.stop), last)):
        if begin < end:
            yield f"\\x{{{begin:X}}}-\\x{{{end:X}}}"
        elif begin == end:
            yield f"\\x{{{begin:X}}}"
