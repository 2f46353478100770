"""Chunks that an engine has framed go to the client as they are; whatever else a read is goes through the parser."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_http.connections import ConnectionLimits, Connections
from kvasir_router.dialects.chat import Chat
from kvasir_router.errors import UpstreamBrokenError, UpstreamMalformedError
from kvasir_router.relay.body import Body, BodyBudget
from kvasir_router.relay.exchange import Exchange, ResponseWriter
from kvasir_router.relay.upstream_answer import IdleTimeouts, UpstreamAnswer
from kvasir_router.relay.upstream_connection import UpstreamConnection

pytestmark = pytest.mark.anyio
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
SOCKET = socket.socket()  # whose options are set
FORMS = ("%x", "%X", "%04x", "%x;a=b")


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    SOCKET.close()


class Wire(asyncio.Transport):
    """Its writing side."""

    def __init__(self) -> None:
        super().__init__({"socket": SOCKET})
        self.written: list[bytes] = []
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, *limits: Any) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Relayed:
    """One answer that is relayed while it comes. Chunks are passed on as they are where `takes_chunks`."""

    def __init__(
        self, *, takes_chunks: bool = True, pieces: list[bytes] | None = None, chunks: list[bytes] | None = None
    ) -> None:
        self.pieces = [] if pieces is None else pieces
        self.chunks = [] if chunks is None else chunks
        self.is_kept = False
        self.connection = UpstreamConnection("http://e", self._keep, lambda _: None)
        self.connection.connection_made(Wire())
        loop = asyncio.get_running_loop()
        self.answer = UpstreamAnswer("http://e", self.connection, IdleTimeouts(60.0, loop), loop)
        self.connection.send([b""], 0, self.answer)
        self._takes_chunks = takes_chunks

    def _keep(self, connection: UpstreamConnection) -> None:
        self.is_kept = True

    async def begin(self, read: bytes) -> asyncio.Task[None]:
        """The answer's first read, and what relays the others."""
        self.connection.data_received(read)
        write_chunk = self.chunks.append if self._takes_chunks else None
        relaying = asyncio.create_task(self.answer.relay(self.pieces.append, write_chunk=write_chunk))
        await asyncio.sleep(0)
        return relaying

    async def read(self, reads: Sequence[bytes]) -> None:
        """All of it."""
        relaying = await self.begin(reads[0])
        for read in reads[1:]:
            self.connection.data_received(read)
        await relaying


async def test_whole_chunks_are_passed_on_as_they_came() -> None:
    relayed = Relayed()
    await relayed.read([HEAD + b"1\r\na\r\n", b"2\r\nbc\r\n", b"a\r\n0123456789\r\n", END])
    assert relayed.pieces == [b"a"]
    assert relayed.chunks == [b"2\r\nbc\r\n", b"a\r\n0123456789\r\n"]
    assert relayed.is_kept


async def test_who_takes_no_chunks_gets_their_bodies() -> None:
    relayed = Relayed(takes_chunks=False)
    await relayed.read([HEAD + b"1\r\na\r\n", b"2\r\nbc\r\n", END])
    assert relayed.pieces == [b"a", b"bc"]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(b"1\r\nb\r\n1\r\nc\r\n", id="two chunks"),
        pytest.param(b"1\r\nb\r\n" + END, id="a chunk and the end"),
        pytest.param(b"02\r\nbc\r\n", id="a size with a zero before it"),
        pytest.param(b"A\r\n0123456789\r\n", id="a size in capitals"),
        pytest.param(b"2;x=y\r\nbc\r\n", id="an extension"),
    ],
)
async def test_what_is_not_one_plain_chunk_is_parsed(read: bytes) -> None:
    relayed = Relayed()
    reads = [HEAD + b"1\r\na\r\n", read] + ([] if read.endswith(END) else [END])
    await relayed.read(reads)
    assert not relayed.chunks
    assert relayed.is_kept


@pytest.mark.parametrize(
    ("begun", "looks_like_one", "rest", "body"),
    [
        pytest.param(b"1", b"2\r\nbc\r\n", b"0123456789abcd\r\n", b"bc\r\n0123456789abcd", id="its size"),
        pytest.param(b"6\r\n", b"1\r\nb\r\n", b"\r\n", b"1\r\nb\r\n", id="its size line"),
        pytest.param(b"8\r\n\r\n", b"1\r\nb\r\n", b"\r\n", b"\r\n1\r\nb\r\n", id="its body"),
    ],
)
async def test_what_has_begun_is_parsed_to_its_end(
    begun: bytes, looks_like_one: bytes, rest: bytes, body: bytes
) -> None:
    relayed = Relayed()
    await relayed.read([HEAD + b"1\r\na\r\n" + begun, looks_like_one, rest, END])
    assert b"".join(relayed.pieces) == b"a" + body
    assert not relayed.chunks


async def test_a_chunk_without_its_end_is_refused() -> None:
    relayed = Relayed()
    with pytest.raises(UpstreamBrokenError, match="no HTTP/1"):
        await relayed.read([HEAD + b"1\r\na\r\n", b"2\r\nbcde", END])
    assert not relayed.chunks


async def test_a_body_of_known_length_is_never_taken_for_chunks() -> None:
    relayed = Relayed()
    await relayed.read([b"HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\na\r\n", b"1\r\nb\r\n", b"cdef"])
    assert relayed.pieces == [b"a\r\n", b"1\r\nb\r\n", b"cdef"]


@pytest.fixture
async def kept() -> Relayed:
    """Whose connection waits for another answer."""
    relayed = Relayed()
    await relayed.read([HEAD + b"1\r\na\r\n", b"1\r\nb\r\n", END])
    loop = asyncio.get_running_loop()
    relayed.answer = UpstreamAnswer("http://e", relayed.connection, IdleTimeouts(60.0, loop), loop)
    relayed.connection.send([b""], 0, relayed.answer)
    relayed.pieces.clear()
    relayed.chunks.clear()
    return relayed


async def test_the_next_answer_begins_with_a_head(kept: Relayed) -> None:
    kept.connection.data_received(b"1\r\nb\r\n")
    with pytest.raises(UpstreamMalformedError):
        await kept.answer.begin()


async def test_the_next_answer_may_have_a_known_length(kept: Relayed) -> None:
    await kept.read([b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n", b"1\r\nb\r\n"])
    assert kept.pieces == [b"1\r\nb\r\n"]
    assert not kept.chunks


async def test_a_closed_answer_passes_nothing_on() -> None:
    relayed = Relayed()
    relaying = await relayed.begin(HEAD + b"1\r\na\r\n")
    relaying.cancel()
    relayed.answer.close()
    relayed.answer.feed_chunk(b"1\r\nb\r\n", 3)
    assert not relayed.chunks


async def test_an_answer_is_not_idle_while_chunks_come() -> None:
    relayed = Relayed()
    relaying = await relayed.begin(HEAD + b"1\r\na\r\n")
    relayed.answer.idle_since(1e9)
    relayed.connection.data_received(b"1\r\nb\r\n")
    assert relayed.answer.idle_since(2e9) == 2e9
    relaying.cancel()


async def test_trailers_are_parsed() -> None:
    relayed = Relayed()
    await relayed.read([HEAD + b"1\r\na\r\n", b"0\r\nx-a: b\r\n", b"\r\n"])
    assert relayed.is_kept


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=20) | st.sampled_from([b"\r\n", b"1\r\nb\r\n"]), max_size=6),
    forms=st.lists(st.sampled_from(FORMS), min_size=6, max_size=6),
    cuts=st.sets(st.integers(0, 200)),
)
def test_however_it_is_cut_the_client_reads_the_same(bodies: list[bytes], forms: list[str], cuts: set[int]) -> None:
    framed = [
        (form % len(body)).encode() + b"\r\n" + body + b"\r\n"
        for form, body in zip(forms, bodies, strict=False)
    ]  # fmt: skip
    stream = b"1\r\na\r\n" + b"".join(framed) + END
    places = sorted(cut for cut in cuts if 0 < cut < len(stream))
    reads = [stream[begin:end] for begin, end in zip([0, *places], [*places, len(stream)], strict=True)]
    asyncio.run(_relays(reads, b"a" + b"".join(bodies)))


async def _relays(reads: list[bytes], body: bytes) -> None:
    written: list[bytes] = []
    relayed = Relayed(pieces=written, chunks=_Unframed(written))
    await relayed.read([HEAD, *reads])
    assert b"".join(written) == body
    assert relayed.is_kept


class _Unframed(list[bytes]):
    """What a client makes of chunks."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies

    def append(self, chunk: bytes) -> None:
        size, _, rest = chunk.partition(b"\r\n")
        assert int(size, 16) == len(rest) - 2 > 0
        self._bodies.append(rest[:-2])


def writer(wire: Wire, *, takes_chunks: bool = True) -> ResponseWriter:
    connections = Connections(ConnectionLimits(9, 9))
    return ResponseWriter(wire, connections, lambda: None, takes_chunks=takes_chunks, keeps_alive=True)


def test_a_framed_chunk_is_written_as_it_is() -> None:
    wire = Wire()
    written = writer(wire)
    written.start(200, [])
    written.write(b"a")
    assert written.write_chunk is not None
    written.write_chunk(b"3\r\nb\n\n\r\n")
    assert wire.written[1:] == [b"3\r\nb\n\n\r\n"]
    assert written.has_sent_last(b"b\n\n")
    assert not written.has_sent_last(b"\r\n")


def test_a_client_that_has_gone_is_written_no_chunk() -> None:
    wire = Wire()
    written = writer(wire)
    written.start(200, [])
    written.write(b"a")
    wire.abort()
    assert written.write_chunk is not None
    written.write_chunk(b"1\r\nb\r\n")
    assert len(wire.written) == 1


def test_a_client_of_http_1_0_is_sent_no_chunk() -> None:
    written = writer(Wire(), takes_chunks=False)
    written.start(200, [])
    assert written.write_chunk is None
    written.write(b"a\n\n")
    assert written.has_sent_last(b"\n\n")


def test_an_answer_of_known_length_is_sent_no_chunk() -> None:
    written = writer(Wire())
    written.start(200, [(b"content-length", b"1")])
    assert written.write_chunk is None


async def test_an_exchange_passes_chunks_on_as_they_came() -> None:
    relayed, wire = Relayed(), Wire()
    relayed.connection.data_received(HEAD + b"1\r\na\r\n")
    exchange = Exchange("/chat", [], Chat(), Body(BodyBudget(1), 1), writer(wire))
    exchange.start(200, relayed.answer.headers)
    relaying = asyncio.create_task(exchange.relay(relayed.answer))
    await asyncio.sleep(0)
    chunk = b"%x\r\nb\r\n" % 1
    relayed.connection.data_received(chunk)
    relayed.connection.data_received(END)
    await relaying
    assert wire.written[-1] is chunk
