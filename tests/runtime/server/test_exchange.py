"""Where answers are shaped, and which streams another engine can have, at the bound of what the router keeps of one."""

import asyncio
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from kvasir_runtime.engine.async_engine import AsyncEngine, GenerateRequest
from kvasir_runtime.engine.detokenizer import TextOptions
from kvasir_runtime.engine.generation import Generation, SequenceDelta
from kvasir_runtime.errors import KvasirRuntimeError, RequestFailedError, RequestMovedError, ServerUnavailableError
from kvasir_runtime.requests.add_request import RequestSpec
from kvasir_runtime.requests.outputs import TokenLogprobs
from kvasir_runtime.requests.sampling_params import BeamSearch, SamplingParams
from kvasir_runtime.server.admission import Admission
from kvasir_runtime.server.chat import CHAT
from kvasir_runtime.server.exchange import INLINE_LOGPROBS, Exchange, event_stream
from kvasir_runtime.server.journal import ROOM_TO_MOVE_BYTES, JournalWriter
from kvasir_runtime.server.middleware import REQUEST_ID
from kvasir_runtime.server.serving import Serving, generating_routes
from kvasir_runtime.transfer.params import KvTransferParams

pytestmark = pytest.mark.anyio
REQUEST = GenerateRequest(
    request_id="c",
    spec=RequestSpec(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=8, seed=7)),
    text=TextOptions(),
)
ASKED_NOTHING = SimpleNamespace(max_body_bytes=1000, max_body_seconds=5.0)
"""What a server is asked whose requests cannot be read."""
BEGINNING = b'{"request_id":"c","created":0,"seeds":[7],"model":"m"}\n'
ENTRY = b"[0,[5],null,0,1]\n"


class OneGeneration:
    """An engine whose only answer the test writes."""

    def __init__(self) -> None:
        self.generation = Generation([0], lambda: None)

    @contextmanager
    def generate(self, requests: Sequence[GenerateRequest], *_: Any) -> Iterator[Generation]:
        yield self.generation

    def draw(self) -> None:
        self.generation.receive(SequenceDelta(index=0, token_ids=[5]))

    def move(self) -> None:
        """As the engine does where the generation says that it can."""
        assert self.generation.can_move
        self.generation.fail(RequestMovedError("h", 1, "k"))


class Shape:
    """Notes the thread that it is used on."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def shown(self, delta: SequenceDelta) -> SequenceDelta:
        return delta

    def whole(self, sequences: Sequence[SequenceDelta], usage: object) -> bytes:
        self.threads.append(threading.current_thread())
        return b"{}"

    def first_event(self, meter: object) -> bytes:
        return b""

    def event(self, delta: SequenceDelta, meter: object) -> bytes:
        self.threads.append(threading.current_thread())
        return b"data: x\n\n"

    def usage_event(self, usage: object) -> bytes:
        return b""

    def end(self) -> bytes:
        return b"event: over\n\n"

    def error_event(self, error: KvasirRuntimeError) -> bytes:
        return f"event: alas\ndata: {error}\n\n".encode()


async def silence() -> MutableMapping[str, Any]:
    """Of a client that waits."""
    return await asyncio.get_running_loop().create_future()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> OneGeneration:
    return OneGeneration()


@pytest.fixture
def exchange(engine: OneGeneration, tmp_path: Path) -> Exchange:
    return Exchange(
        engine=cast(AsyncEngine, engine),
        admission=Admission(tmp_path, 1, 0, 8),
        requests=[REQUEST],
        shape=cast(Any, Shape()),
        shapers=ThreadPoolExecutor(1),
        num_returned=1,
        writer=JournalWriter([REQUEST], 0, "m"),
    )


def kept(exchange: Exchange, *lines: bytes, spare: int = 0, room: int = ROOM_TO_MOVE_BYTES) -> Exchange:
    """Whose router keeps these lines of the stream, and so many bytes."""
    most = sum(map(len, lines)) + spare
    return replace(exchange, writer=JournalWriter([REQUEST], 0, "m", max_bytes=most, room_to_move_bytes=room))


def lines_of(blocks: Sequence[bytes]) -> list[bytes]:
    found = [line for block in blocks for line in block.splitlines(keepends=True) if line.startswith(b": kvasir ")]
    return [line.removeprefix(b": kvasir ") for line in found]


async def rest_of(events: Any) -> list[bytes]:
    """What is written until the stream leaves."""
    blocks: list[bytes] = []
    try:
        async for block in events:
            blocks.append(block)
    except RequestMovedError:
        return blocks
    raise AssertionError("it never left")


@pytest.mark.parametrize("spare", [0, -1])
async def test_a_stream_moves_as_long_as_its_journal_is_kept(
    spare: int, engine: OneGeneration, exchange: Exchange
) -> None:
    assert not engine.generation.can_move, "nothing has come yet"
    events = kept(exchange, BEGINNING, ENTRY, ENTRY, spare=spare).events()
    moves = []
    for _ in range(2):
        engine.draw()
        await anext(events)
        moves.append(engine.generation.can_move)
    assert moves == [True, spare == 0]
    await events.aclose()


@pytest.mark.parametrize("spare", [0, -1])
async def test_blocks_are_kept_only_where_there_is_room_to_say_so(
    spare: int, engine: OneGeneration, exchange: Exchange
) -> None:
    events = kept(exchange, BEGINNING, ENTRY, ENTRY, spare=spare, room=len(ENTRY)).events()
    assert not engine.generation.can_keep
    engine.draw()
    await anext(events)
    assert (engine.generation.can_move, engine.generation.can_keep) == (True, spare == 0)
    await events.aclose()


@pytest.mark.parametrize("spare", [0, -1])
async def test_tokens_that_nobody_has_read_yet_are_drawn_again_where_the_router_could_not_keep_them(
    spare: int, engine: OneGeneration, exchange: Exchange
) -> None:
    events = kept(exchange, BEGINNING, ENTRY, ENTRY, spare=spare).events()
    engine.draw()
    written = [await anext(events)]
    engine.draw()
    engine.move()
    written += await rest_of(events)
    assert lines_of(written) == [BEGINNING, ENTRY, ENTRY][: 3 + spare]


@pytest.mark.parametrize("spare", [0, -1])
async def test_where_the_blocks_are_is_said_where_the_router_can_keep_it(
    spare: int, engine: OneGeneration, exchange: Exchange
) -> None:
    moved = KvTransferParams(do_remote_prefill=True, remote_host="h", remote_port=1, transfer_id="k")
    lines = lines_of([JournalWriter([REQUEST], 0, "m").write_move(moved)])
    events = kept(exchange, BEGINNING, ENTRY, *lines, spare=spare).events()
    engine.draw()
    await anext(events)
    engine.move()
    assert lines_of(await rest_of(events)) == lines[: 1 + spare]


ENTRIES = 21
MOST_INLINE = INLINE_LOGPROBS // ENTRIES
POSITION = TokenLogprobs([5] * ENTRIES, [-1.0] * ENTRIES, 1)


@pytest.mark.parametrize(("num_positions", "is_inline"), [(MOST_INLINE, True), (MOST_INLINE + 1, False)])
@pytest.mark.parametrize("of", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_many_log_probabilities_are_shaped_beside_the_event_loop(
    num_positions: int, is_inline: bool, of: str, is_stream: bool, engine: OneGeneration, exchange: Exchange
) -> None:
    sampling = msgspec.structs.replace(REQUEST.spec.sampling, logprobs=ENTRIES - 1)
    exchange = replace(exchange, requests=[replace(REQUEST, spec=REQUEST.spec.with_sampling(sampling))])
    end = SequenceDelta(index=0, token_ids=[5], finish_reason="length")
    engine.generation.receive(msgspec.structs.replace(end, **{of: [POSITION] * num_positions}))
    if is_stream:
        assert [event async for event in exchange.events()][-1] == b"event: over\n\n"
    else:
        assert await exchange.whole() == b"{}"
    [thread] = cast(Shape, exchange.shape).threads
    assert (thread is threading.current_thread()) is is_inline


@pytest.mark.parametrize(("width", "is_let_in"), [(8, True), (9, False)])
async def test_a_beam_search_counts_as_the_sequences_of_its_beam(
    width: int, is_let_in: bool, engine: OneGeneration, exchange: Exchange
) -> None:
    exchange = replace(
        exchange, requests=[replace(REQUEST, spec=msgspec.structs.replace(REQUEST.spec, beam=BeamSearch(width=width)))]
    )
    engine.generation.receive(SequenceDelta(index=0, token_ids=[5], finish_reason="length"))
    if is_let_in:
        assert await exchange.whole() == b"{}"
    else:
        with pytest.raises(ServerUnavailableError, match="no more than 8"):
            await exchange.whole()


async def test_what_goes_wrong_in_a_stream_is_told_in_the_words_of_its_shape(
    engine: OneGeneration, exchange: Exchange
) -> None:
    engine.draw()
    engine.generation.fail(RequestFailedError("no room"))
    sent: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http"}
    await (await event_stream(Request(scope, silence), exchange))(scope, silence, send)
    assert sent[-2:] == [b"event: alas\ndata: no room\n\n", b""]


def test_what_goes_wrong_before_is_told_in_the_words_of_the_route() -> None:
    route = replace(CHAT, path="/v1/other", refusal=lambda error: Response(f"alas: {error}", 418))
    app = FastAPI()
    app.include_router(generating_routes(cast(Serving, ASKED_NOTHING), [route]))

    async def app_with_request_ids(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, REQUEST_ID: "r"}, receive, send)

    answer = TestClient(app_with_request_ids).post("/v1/other", content=b"{")
    assert (answer.status_code, answer.text[:34]) == (418, "alas: the body is not valid JSON: ")
