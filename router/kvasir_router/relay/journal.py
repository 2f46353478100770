"""What the router keeps of a stream so that another engine can continue it: the stream's journal, line by line.

An engine that keeps one puts a comment line before each event, in the event's own block (blocks end at an empty line).
The comments are taken out of what the client gets and kept; only engines read them, but for the end of the last one. A
block is passed on whole or not at all, so what the journal accounts for is exactly what the client has.
"""

RESUMABLE_HEADER = "x-kvasir-resumable"
"""In a request: keep a journal. In an answer: here it is."""
JOURNAL_HEADER = "x-kvasir-journal-at"
"""How many bytes of the body are the client's; the journal follows them."""
MAX_JOURNAL_BYTES = 4 * 2**20
"""Of one stream: at some 20 bytes a token 200,000 tokens. A longer one cannot be continued."""

_COMMENT = b": kvasir "
_END_OF_BLOCK = b"\n\n"
_END_OF_MOVE = b"}]\n"


class Journal:
    def __init__(self) -> None:
        self._lines = bytearray()
        self._beginning_of_block: list[bytes] = []  # in pieces, since a large one may come in thousands
        self.is_too_long = False

    @property
    def lines(self) -> bytes:
        return bytes(self._lines)

    @property
    def num_bytes(self) -> int:
        """Grows with every event."""
        return len(self._lines)

    @property
    def num_events(self) -> int:
        """About as many as tokens."""
        return self._lines.count(b"\n")

    @property
    def is_moved(self) -> bool:
        """The engine that has let go of the stream says where its KV is: of all lines only that one ends so."""
        return self._lines.endswith(_END_OF_MOVE)

    def split(self, chunk: bytes) -> tuple[bytes, bytes]:
        """The events that are whole now, without comments, and the comments' lines, to be kept once those are sent."""
        if pieces := self._beginning_of_block:
            ends_here = _END_OF_BLOCK in pieces[-1][-1:] + chunk
            pieces.append(chunk)
            if not ends_here:
                return b"", b""
            chunk = b"".join(pieces)
        *blocks, rest = chunk.split(_END_OF_BLOCK)
        self._beginning_of_block = [rest] if rest else []
        events, lines = [], []
        for block in blocks:
            if block.startswith(_COMMENT):
                line, _, block = block.partition(b"\n")
                lines.append(line[len(_COMMENT) :])
            if block:
                events.append(block)
        return _joined(events, _END_OF_BLOCK), _joined(lines, b"\n")

    def keep(self, lines: bytes) -> None:
        """Accounts for events that the client has."""
        if len(self._lines) + len(lines) > MAX_JOURNAL_BYTES:
            self.is_too_long = True
            self._lines.clear()
        if not self.is_too_long:
            self._lines += lines

    def drop_unfinished_block(self) -> None:
        """Before another engine goes on: it writes that block again."""
        self._beginning_of_block.clear()


def _joined(parts: list[bytes], end: bytes) -> bytes:
    return end.join(parts) + end if parts else b""
