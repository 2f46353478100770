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
        self._beginnings = {mark[:length] for mark in self.marks for length in range(len(mark))}
        self._max_length = max(map(len, self.marks), default=0)

    def may_be_at(self, text: str, position: int) -> bool:
        """Whether the text ends before it is known which mark stands here."""
        return text[position : position + self._max_length] in self._beginnings

    def at(self, text: str, position: int) -> str | None:
        return next((mark for mark in self.marks if text.startswith(mark, position)), None)

    def find(self, text: str, position: int) -> tuple[int, str | None]:
        """Where the first one stands. None: where one may come to stand, or the text's end."""
        begun = self._begun(text, position)
        found = self._pattern.search(text, position) if self._pattern else None
        return (found.start(), found.group()) if found and found.start() < begun else (begun, None)

    def find_whole(self, text: str, position: int) -> tuple[int, str | None]:
        """The same where no text follows."""
        found = self._pattern.search(text, position) if self._pattern else None
        return (found.start(), found.group()) if found else (len(text), None)

    def _begun(self, text: str, position: int) -> int:
        for length in range(min(self._max_length - 1, len(text) - position), 0, -1):
            if text[-length:] in self._beginnings:
                return len(text) - length
        return len(text)


@cache
def marks_of(*marks: str) -> Marks:
    return Marks(marks)


@cache
def _run_of(chars: str) -> re.Pattern[str]:
    return re.compile(f"[{re.escape(chars)}]*")


class Scanner:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._anchor: int | None = None
        self._is_ended = False
        self.is_cut = False
        """The text ended before the model ended it."""

    def add(self, text: str) -> None:
        kept = self._position if self._anchor is None else self._anchor
        self._text = self._text[kept:] + text
        self._position -= kept
        if self._anchor is not None:
            self._anchor = 0

    def end(self, *, is_cut: bool) -> None:
        """No text will follow."""
        self._is_ended = True
        self.is_cut = is_cut

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

    def take_there(self, pattern: re.Pattern[str]) -> str:
        """What is there of it."""
        match = pattern.match(self._text, self._position)
        return self.take(len(match.group())) if match else ""

    def char(self) -> Reading[str]:
        """The next one, which stays; empty at the end."""
        return (yield from self.chars(1))

    def chars(self, num_chars: int) -> Reading[str]:
        """The next ones, which stay; fewer at the end."""
        while self._position + num_chars > len(self._text) and not self._is_ended:
            yield
        return self._text[self._position : self._position + num_chars]

    def at(self, marks: Marks) -> Reading[str | None]:
        """The longest of them that stands here; it stays."""
        while not self._is_ended and marks.may_be_at(self._text, self._position):
            yield
        return marks.at(self._text, self._position)

    def take_mark(self, marks: Marks) -> Reading[str | None]:
        mark = yield from self.at(marks)
        return self.take(len(mark)) if mark is not None else None

    def take_while(self, chars: str) -> Reading[str]:
        """All that are made of these."""
        return (yield from self.take_run(_run_of(chars)))

    def take_run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Of characters that match, one by one."""
        taken = ""
        while True:
            taken += self.take_there(pattern)
            if self._position < len(self._text) or self._is_ended:
                return taken
            yield

    def take_until(self, marks: Marks, write: Write, *, held: str = "") -> Reading[str | None]:
        """Hands text on as it comes, up to the first mark and the `held` characters before it: there the scanner
        stands. None: the text has ended, but for such characters."""
        while True:
            find = marks.find_whole if self._is_ended else marks.find
            end, mark = find(self._text, self._position)
            text = self._text[self._position : end].rstrip(held) if held else self._text[self._position : end]
            if text:
                write(self.take(len(text)))
            if mark is not None or self._is_ended:
                return mark
            yield
