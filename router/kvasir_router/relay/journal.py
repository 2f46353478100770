"""What the router keeps of a stream so that another engine can continue it: the stream's journal, line by line.

An engine that keeps one puts a comment line before each event, in the event's own block (blocks end at an empty line).
Several events with one line are one block: between them the empty line has another spelling, which the client does not
see. The comments are taken out of what the client gets and kept; only engines read them, but for the end of the last
one. A block is passed on whole or not at all, so what the journal accounts for is exactly what the client has. What is
kept counts in the budget of held bodies; where that has no room, the journal is given up, and the stream goes on
without.
"""

from dataclasses import dataclass

from kvasir_router.relay.body import BodyBudget

RESUMABLE_HEADER = "x-kvasir-resumable"
"""In a request: keep a journal. In an answer: here it is."""
JOURNAL_HEADER = "x-kvasir-journal-at"
"""How many bytes of the body are the client's; the journal follows them."""

_COMMENT = b": kvasir "
_END_OF_BLOCK = b"\n\n"
_END_WITHIN_BLOCK = b"\n\r\n"
_END_OF_MOVE = b"}]\n"


@dataclass(frozen=True)
class JournalBounds:
    max_bytes: int = 4 * 2**20
    """Of one stream: at some 20 bytes a token 200,000 tokens. A longer one cannot be continued."""
    max_block_bytes: int = 16 * 2**20
    """Held of a block that has not ended: the log probabilities of a long prompt are one event. A stream with a longer
    one cannot be continued; that block is passed on as it comes."""


JOURNAL_BOUNDS = JournalBounds()


class Journal:
    """Whoever handles the request drops it at the latest."""

    def __init__(self, budget: BodyBudget, bounds: JournalBounds = JOURNAL_BOUNDS) -> None:
        self._budget = budget
        self._bounds = bounds
        self._num_counted_bytes = 0
        self._lines = bytearray()
        self.num_events = 0
        """About as many as tokens."""
        self._beginning_of_block = bytearray()  # a large one may come in thousands of pieces
        self._last_of_passed = b""  # last byte of a block that is passed on as it comes; none: there is no such block
        self.is_given_up = False
        """The stream cannot be continued: the journal, or a block, was too long, or nothing could need it any more."""

    @property
    def lines(self) -> bytes:
        return bytes(self._lines)

    @property
    def num_bytes(self) -> int:
        """Grows with every event."""
        return len(self._lines)

    @property
    def is_moved(self) -> bool:
        """The engine that has let go of the stream says where its KV is: of all lines only that one ends so."""
        return self._lines.endswith(_END_OF_MOVE)

    def split(self, chunk: bytes) -> tuple[bytes, bytes]:
        """The events that are whole now, without comments, and the comments' lines, to be kept once those are sent."""
        if self._last_of_passed:
            return self._pass_on(chunk)
        if self._beginning_of_block:
            ends_here = _END_OF_BLOCK in self._beginning_of_block[-1:] + chunk
            if not ends_here:
                return self._hold(chunk), b""
            chunk = b"".join((self._beginning_of_block, chunk))
        *blocks, rest = chunk.split(_END_OF_BLOCK)
        self._beginning_of_block.clear()
        events, lines = [], []
        for block in blocks:
            if block.startswith(_COMMENT):
                line, _, block = block.partition(b"\n")
                lines.append(line[len(_COMMENT) :])
            if block:
                events.append(block.replace(_END_WITHIN_BLOCK, _END_OF_BLOCK) if b"\r" in block else block)
        too_long = self._hold(rest) if rest else b""
        return _joined(events, _END_OF_BLOCK) + too_long, _joined(lines, b"\n")

    def keep(self, lines: bytes) -> None:
        """Accounts for events that the client has."""
        if not self.is_given_up:
            self._lines += lines
            self.num_events += lines.count(b"\n")
        if not self._is_within_budget() or len(self._lines) > self._bounds.max_bytes:
            self._give_up()

    def drop_unfinished_block(self) -> None:
        """Before another engine goes on: it writes that block again."""
        self._beginning_of_block.clear()
        self._is_within_budget()

    def drop(self) -> None:
        """Nothing can need it any more. May be repeated."""
        self._beginning_of_block.clear()
        self._give_up()

    def _is_within_budget(self) -> bool:
        """Counts what is held now, if there is room for it."""
        num_bytes = len(self._lines) + len(self._beginning_of_block)
        if not self._budget.take_for_journal(num_bytes - self._num_counted_bytes):
            return False
        self._num_counted_bytes = num_bytes
        return True

    def _hold(self, piece: bytes) -> bytes:
        """Of an unfinished block. Returns what is passed on once it is too much: all so far but its comment."""
        self._beginning_of_block += piece
        num_bytes, is_within_budget = len(self._beginning_of_block), self._is_within_budget()
        may_be_comment = num_bytes < len(_COMMENT)
        if num_bytes <= self._bounds.max_block_bytes and (is_within_budget or may_be_comment):
            return b""
        self._give_up()
        event = bytes(self._beginning_of_block)
        self._beginning_of_block.clear()
        if event.startswith(_COMMENT):
            _, newline, event = event.partition(b"\n")
            if not event:
                self._beginning_of_block += _COMMENT + newline
        self._last_of_passed = event[-1:]
        self._is_within_budget()
        return event

    def _pass_on(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Up to the block's end as it comes, then as ever."""
        end = (self._last_of_passed + chunk).find(_END_OF_BLOCK)
        if end < 0:
            self._last_of_passed = chunk[-1:]
            return chunk, b""
        self._last_of_passed = b""
        size = end + len(_END_OF_BLOCK) - 1  # of the block's rest in this chunk
        events, lines = self.split(chunk[size:])
        return chunk[:size] + events, lines

    def _give_up(self) -> None:
        self.is_given_up = True
        self._lines.clear()
        self._is_within_budget()


def _joined(parts: list[bytes], end: bytes) -> bytes:
    return end.join(parts) + end if parts else b""
