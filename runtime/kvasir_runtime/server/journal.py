"""A stream's journal: what another replica needs to continue the stream, and how this one continues another's.

The router asks for it with a header. A comment line then precedes each event in the event's own block, so that either
both arrive or neither: the first tells how the stream began, each other one the tokens that its event accounts for.
Of several events with one line, all but the last end in another spelling of an empty line, a carriage return and a line
feed, so that they are one block on their way. When the engine is lost, the router sends the request's body to another
with all the lines behind it. Only engines read the lines; what the router must know is the comment's mark, the two
headers, and how events end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from kvasir_runtime.config import KvTransferConfig
from kvasir_runtime.engine.async_engine import GenerateRequest
from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.outputs import FinishReason
from kvasir_runtime.server.errors import OtherModelError
from kvasir_runtime.server.resolving import UINT64_MASK, check_token_ids
from kvasir_runtime.transfer.params import KvTransferParams

RESUMABLE_HEADER = "x-kvasir-resumable"
"""In a request: keep a journal. In an answer: here it is."""
JOURNAL_HEADER = "x-kvasir-journal-at"
"""How many bytes of the body are the client's; the journal follows them."""
MAX_JOURNAL_BYTES = 4 * 2**20
"""The router keeps no longer one, so a stream with a longer one stays where it is."""
ROOM_TO_MOVE_BYTES = 2**16
"""Of that for the line that says where the blocks are, and for what is still to be written when the stream leaves."""
COMMENT = b": kvasir "
END_OF_LINE = b"\n"
END_OF_EVENT = b"\n\n"
END_WITHIN_BLOCK = b"\n\r\n"


class Beginning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is decided once, when a stream begins."""

    request_id: str
    created: int
    seeds: list[int]
    """One for each prompt."""
    model: str
    """The model's digest: tokens of one model are not continued by another."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What one event, or one that was not worth sending, accounts for."""

    index: int | None
    """None: of no sequence, but the stream's usage, which comes once and last."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_events: int = 0


class Move(Entry, frozen=True, array_like=True):
    """An entry as it is read: the last one of an engine that hands the stream over has a field more."""

    moved: KvTransferParams | None = None
    """Where whoever goes on finds the blocks; of no use to the one after that."""


_encoder = msgspec.json.Encoder()
_beginning_decoder = msgspec.json.Decoder(Beginning)
_entry_decoder = msgspec.json.Decoder(Move)


@dataclass(frozen=True, slots=True)
class Journal:
    """How a stream began and what others have sent of it; without a beginning it begins here."""

    beginning: Beginning | None = None
    sequences: Mapping[int, SequenceDelta] = field(default_factory=dict)
    has_usage: bool = False
    num_events: int = 0
    """That others have sent of sequences."""
    moved: KvTransferParams | None = None
    """Where the blocks are of what was sent, if they were kept for whoever goes on."""
    num_bytes: int = 0

    @property
    def has_begun(self) -> bool:
        return self.beginning is not None

    def created(self, now: int) -> int:
        return now if self.beginning is None else self.beginning.created

    def continued(
        self,
        requests: Sequence[GenerateRequest],
        model: str,
        vocab_size: int,
        *,
        is_stream: bool,
        kv_transfer: KvTransferConfig | None = None,
    ) -> list[GenerateRequest]:
        """The requests as they began; `kv_transfer`: whether blocks that were kept for them can be had.

        Raises OtherModelError, and InvalidRequestError for a journal not of theirs.
        """
        if self.beginning is None:
            return list(requests)
        if not is_stream:
            raise InvalidRequestError("a journal continues streams only; send the request with stream: true")
        if any(request.spec.comes_whole for request in requests):
            raise InvalidRequestError(
                "an answer that is searched for cannot be continued: what other engines made of it says too little"
            )
        if self.beginning.model != model:
            raise OtherModelError("the stream was begun by another model than the one served here")
        if len(self.beginning.seeds) != len(requests):
            raise InvalidRequestError(f"the journal is of {len(self.beginning.seeds)} prompts, not {len(requests)}")
        if not all(0 <= seed <= UINT64_MASK for seed in self.beginning.seeds):
            raise InvalidRequestError(f"the journal has the seeds {self.beginning.seeds}, but seeds have 64 bits")
        for index, sequence in self.sequences.items():
            self._check(index, sequence, requests, vocab_size)
        moved = self.moved if kv_transfer is not None and kv_transfer.can_consume else None
        return [
            replace(
                request,
                request_id=self.beginning.request_id,
                arrival_time=float(self.beginning.created),  # it keeps its place before those that came later
                spec=msgspec.structs.replace(
                    request.spec,
                    sampling=msgspec.structs.replace(request.spec.sampling, seed=seed),
                    kv_transfer_params=moved or request.spec.kv_transfer_params,
                ),
            )
            for request, seed in zip(requests, self.beginning.seeds, strict=True)
        ]

    @staticmethod
    def _check(index: int, sequence: SequenceDelta, requests: Sequence[GenerateRequest], vocab_size: int) -> None:
        n = requests[0].n
        if not 0 <= index < n * len(requests):
            raise InvalidRequestError(f"the journal has a sequence {index}, but {n * len(requests)} were asked for")
        check_token_ids(sequence.token_ids, vocab_size, "the journal")
        max_tokens = requests[index // n].spec.sampling.max_tokens
        if sequence.finish_reason is None and len(sequence.token_ids) >= max_tokens:
            raise InvalidRequestError(
                f"the journal has {len(sequence.token_ids)} tokens of sequence {index} and no end, but the most here "
                f"are {max_tokens}"
            )


BEGINS_HERE = Journal()


def body_limit(max_body_bytes: int, headers: Mapping[str, str]) -> int:
    """Bytes to read at most: what a client may send, and the journal behind it."""
    return max_body_bytes + (MAX_JOURNAL_BYTES if JOURNAL_HEADER in headers else 0)


def split_body(body: bytes, headers: Mapping[str, str]) -> tuple[bytes, Journal]:
    """The client's own body, and the journal that the router put behind it. Raises InvalidRequestError."""
    length = headers.get(JOURNAL_HEADER)
    if length is None:
        return body, BEGINS_HERE
    if not (length.isascii() and length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise InvalidRequestError(f"{JOURNAL_HEADER}: {length[:40]!r} is no length within a body of {len(body)} bytes")
    return body[: int(length)], read_journal(body[int(length) :])


def read_journal(lines: bytes) -> Journal:
    """From the comments' contents, one a line. Raises InvalidRequestError."""
    first, _, rest = lines.partition(b"\n")
    try:
        beginning, entries = _beginning_decoder.decode(first), _entry_decoder.decode_lines(rest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the stream's journal cannot be read: {error}") from error
    sequences: dict[int, SequenceDelta] = {}
    has_usage, num_events, moved = False, 0, None
    for entry in entries:
        moved = entry.moved
        if moved is not None:
            continue  # it tells nothing of the sequence that it names
        if entry.index is None:
            has_usage = True
            continue
        num_events += entry.num_events
        sequence = sequences.setdefault(entry.index, SequenceDelta(index=entry.index))
        sequence.token_ids += entry.token_ids
        sequence.finish_reason = entry.finish_reason
        sequence.num_cached_tokens = sequence.num_cached_tokens or entry.num_cached_tokens
    return Journal(beginning, sequences, has_usage, num_events, moved, len(lines))


class EventWriter:
    """Events as clients see them, without a journal."""

    is_resumable = False

    @property
    def can_continue(self) -> bool:
        """Whether another engine could go on from all that was written."""
        return False

    @property
    def can_keep(self) -> bool:
        """Whether it could also be told where the blocks are."""
        return False

    def begin(self, event: bytes = b"") -> bytes:
        """The stream's beginning, with its first event where that belongs to no sequence."""
        return event

    def write(self, delta: SequenceDelta, event: bytes) -> bytes:
        """A delta's event; empty where there is nothing to show yet."""
        return event

    def write_usage(self, event: bytes) -> bytes:
        return event

    def write_move(self, params: KvTransferParams) -> bytes:
        """Where the blocks are of a stream, of one sequence, that goes on in another engine."""
        return b""


WITHOUT_JOURNAL = EventWriter()


class JournalWriter(EventWriter):
    """Each event behind its line of the journal. `num_bytes`: of the lines that other engines have written."""

    is_resumable = True

    def __init__(
        self, requests: Sequence[GenerateRequest], created: int, model: str, num_bytes: int = 0, *,
        max_bytes: int = MAX_JOURNAL_BYTES, room_to_move_bytes: int = ROOM_TO_MOVE_BYTES,
    ) -> None:  # fmt: skip
        seeds = [request.spec.sampling.seed for request in requests]
        self._beginning = Beginning(requests[0].request_id, created, seeds, model)
        self._num_bytes = num_bytes
        self._max_bytes = max_bytes
        self._room_to_move_bytes = room_to_move_bytes

    @property
    def can_continue(self) -> bool:
        return self._num_bytes <= self._max_bytes

    @property
    def can_keep(self) -> bool:
        return self._num_bytes + self._room_to_move_bytes <= self._max_bytes

    def begin(self, event: bytes = b"") -> bytes:
        return self._block(self._beginning, event)

    def write(self, delta: SequenceDelta, event: bytes) -> bytes:
        num_events = event.count(END_OF_EVENT)
        entry = Entry(delta.index, delta.token_ids, delta.finish_reason, delta.num_cached_tokens, num_events)
        return self._block(entry, event)

    def write_usage(self, event: bytes) -> bytes:
        return self._block(Entry(None, []), event)

    def write_move(self, params: KvTransferParams) -> bytes:
        """Nothing where the router could not keep it: the stream goes on without the blocks."""
        block = self._block(Move(0, [], moved=params), b"")
        return block if self.can_continue else b""

    def _block(self, line: Beginning | Entry, event: bytes) -> bytes:
        encoded = _encoder.encode(line) + b"\n"
        self._num_bytes += len(encoded)
        return COMMENT + encoded + (_as_one_block(event) or END_OF_LINE)


def _as_one_block(events: bytes) -> bytes:
    if events.count(END_OF_EVENT) < 2:
        return events
    return events[: -len(END_OF_EVENT)].replace(END_OF_EVENT, END_WITHIN_BLOCK) + END_OF_EVENT


def event_writer(
    headers: Mapping[str, str], requests: Sequence[GenerateRequest], created: int, model: str, journal: Journal
) -> EventWriter:
    """As the request's sender wants it; what comes whole at its end is not continued."""
    if RESUMABLE_HEADER not in headers or any(request.spec.comes_whole for request in requests):
        return WITHOUT_JOURNAL
    return JournalWriter(requests, created, model, journal.num_bytes)
