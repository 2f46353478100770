"""Text that comes in pieces, read as though it were there: a reading that needs more of it yields, and is resumed when
more has come.

Positions are no one's to keep, since text that was read is forgotten. Who may have to go back sets an anchor, and
remembers offsets from it.
"""

import re
from collections.abc import Callable, Generator, Iterable
from functools import cache
from typing import Final, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Write = Callable[[str], None]

WHITE_SPACE: Final = " \t\r\n"


class Marks:
    """Texts to look for."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(sorted(set(marks), key=len, reverse=True))
        self._pattern = re.compile("|".join(map(re.escape, self.marks))) if self.marks else None
        self._beginnings = {mark[:length] for mark in self.marks for length in range(1, len(mark))}
        self._max_length = max(map(len, self.marks), default=0)

    def may_be_at(self, text: str, position: int) -> bool:
        """Whether the text ends before it is known which mark stands here."""
        return text[position : position + self._max_length] in self._beginnings or position == len(text)

    def at(self, text: str, position: int) -> str | None:
        return next((mark for mark in self.marks if text.startswith(mark, position)), None)

    def find(self, text: str, position: int) -> tuple[int, str | None]:
        """Where the first one stands, or may yet come to stand; None: it may be a mark or none, or there is none."""
        found = self._pattern.search(text, position) if self._pattern else None
        begun = len(text)
        for length in range(min(self._max_length - 1, len(text) - position), 0, -1):
            if text[-length:] in self._beginnings:
                begun = len(text) - length
                break
        return (found.start(), found.group()) if found and found.start() < begun else (begun, None)


@cache
def marks_of(*marks: str) -> Marks:
    return Marks(marks)


class Scanner:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._anchor: int | None = None
        self._is_ended = False

    def add(self, text: str) -> None:
        kept = self._position if self._anchor is None else self._anchor
        self._text = self._text[kept:] + text
        self._position -= kept
        if self._anchor is not None:
            self._anchor = 0

    def end(self) -> None:
        """No text will follow."""
        self._is_ended = True

    def set_anchor(self) -> None:
        self._anchor = self._position

    def lift_anchor(self) -> None:
        self._anchor = None

    @property
    def offset(self) -> int:
        """From the anchor."""
        return self._position - (self._anchor or 0)

    def go_to(self, offset: int) -> None:
        self._position = (self._anchor or 0) + offset

    def take(self, num_chars: int) -> str:
        """Of those that are there."""
        taken = self._text[self._position : self._position + num_chars]
        self._position += len(taken)
        return taken

    def char(self) -> Reading[str]:
        """The next one, which stays; empty at the end."""
        while self._position == len(self._text) and not self._is_ended:
            yield
        return self._text[self._position : self._position + 1]

    def chars(self, num_chars: int) -> Reading[str]:
        """The next ones, which stay; fewer at the end."""
        while self._position + num_chars > len(self._text) and not self._is_ended:
            yield
        return self._text[self._position : self._position + num_chars]

    def at(self, marks: Marks) -> Reading[str | None]:
        """Which of them stands here; it stays."""
        while not self._is_ended and marks.may_be_at(self._text, self._position):
            yield
        return marks.at(self._text, self._position)

    def take_mark(self, marks: Marks) -> Reading[str | None]:
        mark = yield from self.at(marks)
        return self.take(len(mark)) if mark is not None else None

    def take_while(self, chars: str) -> Reading[str]:
        """All that are made of these."""
        taken = ""
        while True:
            end = self._position
            while end < len(self._text) and self._text[end] in chars:
                end += 1
            is_all = end < len(self._text) or self._is_ended
            taken += self.take(end - self._position)
            if is_all:
                return taken
            yield

    def take_matching(self, pattern: re.Pattern[str]) -> str:
        """What is there of it."""
        match = pattern.match(self._text, self._position)
        return self.take(len(match.group())) if match else ""

    def take_until(self, marks: Marks, write: Write, *, held: str = "") -> Reading[str | None]:
        """Hands on text as it comes, up to the first mark and the `held` characters before it: the scanner then stands
        at those. None: the text has ended, and only such characters are left."""
        while True:
            end, mark = marks.find(self._text, self._position)
            if self._is_ended and mark is None:
                end, mark = self._first_whole(marks)
            kept = self._text[self._position : end].rstrip(held) if held else self._text[self._position : end]
            if kept:
                write(self.take(len(kept)))
            if mark is not None or self._is_ended:
                return mark
            yield

    def _first_whole(self, marks: Marks) -> tuple[int, str | None]:
        found = [(at, -len(mark), mark) for mark in marks.marks if (at := self._text.find(mark, self._position)) >= 0]
        if not found:
            return len(self._text), None
        at, _, mark = min(found)
        return at, mark
