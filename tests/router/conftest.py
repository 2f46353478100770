"""A fake engine on a real socket, and routers in front of it.

The engine answers with numbered tokens, can be slow, die, hang, refuse or be unready, and remembers what it was asked.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.loopback import own_host
from tests.router.prefix_index.publisher import Publisher, publishing

from kvasir_router.config import RouterConfig
from kvasir_router.discovery import Kubernetes
from kvasir_router.endpoints.kubernetes import ServiceReference
from kvasir_router.endpoints.reflector import ObjectApi
from kvasir_router.relay.journal import JOURNAL_HEADER, RESUMABLE_HEADER
from kvasir_router.server import RunningRouter, running
from kvasir_router.service.registry import EndpointState
from kvasir_router.tuning import Tuning

MODEL = "tiny"
MOVE = b'[0,[],null,0,{"do_remote_prefill":true}]\n'


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class FakeEngine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.host = "127.0.0.1"
        self.models = [MODEL]
        self.max_model_len: int | None = None
        self.num_tokens = 5
        self.token_seconds = 0.0
        self.status = 200
        self.retry_after: str | None = None
        self.is_ready = True
        self.die_before_headers = False
        self.die_before_first_token = False
        self.die_after_tokens: int | None = None
        self.die_after_bytes: int | None = None  # of the stream
        self.hangs_within_event = False  # its first
        self.keeps_journal = False
        self.moves_after_tokens: int | None = None  # its KV with it
        self.ends_after_tokens: int | None = None  # as if that were all, but for the last event
        self.is_healthy = True
        self.is_silent = False  # takes connections and answers nothing
        self.hang_after_tokens: int | None = None
        self.lets_go = True  # of a stream that hangs, when asked to hand it over
        self.asked_to_hand_over: list[str] = []
        self.metrics = ""
        self.redirect_to: str | None = None
        self.tokenizer_card: dict[str, Any] | None = None  # None: it has none to give
        self.tokenizer_status = 404  # where it has none
        self.num_tokenizer_requests = 0
        self.gate = asyncio.Event()  # closed: an answer waits before its first token
        self.later_gate = asyncio.Event()  # closed: a stream waits before its second token
        self.later_gate.set()
        self.gate.set()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.journals: list[bytes] = []
        self.started = asyncio.Condition()
        self.aborted = asyncio.Event()
        self._lets_go_now = asyncio.Event()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def stream_bytes(self, num_tokens: int) -> bytes:
        """What the first tokens of a stream look like on the wire."""
        return b"".join(_token_event(number) for number in range(num_tokens))

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/tokenizer", self._tokenizer)
        app.router.add_post("/migrate/request", self._hand_over)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def is_running(self) -> bool:
        return self._runner is not None

    def let_go(self) -> None:
        """Of a stream that hangs, as when it drains."""
        self._lets_go_now.set()

    async def wait_for_requests(self, count: int) -> None:
        async with self.started:
            await self.started.wait_for(lambda: len(self.requests) >= count)

    async def _ready(self, request: web.Request) -> web.Response:
        if self.is_silent:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.is_ready and self.is_healthy else 503)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"object": "model"} if self.max_model_len is None else {"max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [{"id": name, **card} for name in self.models]})

    async def _tokenizer(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        self.num_tokenizer_requests += 1
        if self.tokenizer_card is None:
            return web.Response(status=self.tokenizer_status)
        return web.json_response(self.tokenizer_card)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _hand_over(self, request: web.Request) -> web.Response:
        self.asked_to_hand_over.append((await request.json())["request_id"])
        if not self.lets_go:
            return web.Response(status=409)
        self.let_go()
        return web.Response(status=202)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        at = int(request.headers.get(JOURNAL_HEADER, len(body)))
        body, journal = body[:at], body[at:]
        try:
            asked = json.loads(body)
        except ValueError:  # the router reads only what it needs, and leaves the rest of a body to the engine
            return web.json_response({"error": {"message": "no JSON"}}, status=400)
        async with self.started:
            self.paths.append(request.raw_path)
            self.journals.append(journal)
            self.bodies.append(body)
            self.requests.append(asked)
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.started.notify_all()
        try:
            return await self.speak(request, asked)
        except (asyncio.CancelledError, aiohttp.ClientConnectionResetError):
            self.aborted.set()
            raise

    async def speak(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if self.die_before_headers:
            _abort(request)
        if self.redirect_to is not None:
            return web.Response(status=307, headers={"location": self.redirect_to + request.path})
        if self.status != 200:
            headers = {} if self.retry_after is None else {"retry-after": self.retry_after}
            body = {"error": {"message": self.name, "code": self.status}}
            return web.json_response(body, status=self.status, headers=headers)
        if asked.get("stream"):
            return await self._stream(request, self.journals[-1])
        await self.gate.wait()
        await asyncio.sleep(self.num_tokens * self.token_seconds)
        text = " ".join(str(number) for number in range(self.num_tokens))
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [_choice("message", text)],
        }
        return web.json_response(answer, headers={"x-engine": self.name})

    async def _stream(self, request: web.Request, journal: bytes) -> web.StreamResponse:
        """With a journal, a line of it before each event; from the tokens on that a given one accounts for."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine": self.name})
        is_kept = self.keeps_journal and RESUMABLE_HEADER in request.headers
        if is_kept:
            response.headers[RESUMABLE_HEADER] = "1"
        await response.prepare(request)
        if self.die_before_first_token:
            _abort(request)
        await self.gate.wait()
        num_sent, num_bytes = journal.count(b"]\n") - journal.count(b"}]\n"), 0
        for number in range(num_sent, self.num_tokens):
            if number == self.die_after_tokens:
                _abort(request)
            if number == self.ends_after_tokens:
                return response
            if number == self.moves_after_tokens:
                await response.write(b": kvasir " + MOVE + b"\n")
                return response
            if number:
                await self.later_gate.wait()
            if number == self.hang_after_tokens:
                await self._lets_go_now.wait()
                await response.write(b": kvasir " + MOVE + b"\n")
                return response
            block = (b": kvasir [%d]\n" % number if is_kept else b"") + _token_event(number)
            num_bytes += len(block)
            if self.hangs_within_event:
                await response.write(block[:5])
                await asyncio.Event().wait()
            if self.die_after_bytes is not None and num_bytes > self.die_after_bytes:
                await response.write(block[: len(block) - (num_bytes - self.die_after_bytes)])
                await asyncio.sleep(0.02)  # the part is on its way before the end
                _abort(request)
            await response.write(block)
            await asyncio.sleep(self.token_seconds)
        await response.write(b"data: [DONE]\n\n")
        if self.hang_after_tokens == self.num_tokens:
            await asyncio.Event().wait()
        return response


def _choice(kind: str, text: str) -> dict[str, Any]:
    return {"index": 0, kind: {"role": "assistant", "content": text}, "finish_reason": None}


def _abort(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError("the fake engine died")


def _token_event(number: int) -> bytes:
    chunk = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [_choice("delta", f"{number} ")],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def _until(condition: Callable[[], bool]) -> None:
    """Waits for a state that nothing announces; the test's own timeout bounds it."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    return _until


@pytest.fixture
async def exit_stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def engines(exit_stack: AsyncExitStack) -> list[FakeEngine]:
    """Two running engines."""
    pair = [FakeEngine("one"), FakeEngine("two")]
    for engine in pair:
        await engine.start()
        exit_stack.push_async_callback(engine.stop)
    return pair


@pytest.fixture
def engine(engines: list[FakeEngine]) -> FakeEngine:
    return engines[0]


@pytest.fixture
async def engines_apart(engines: list[FakeEngine]) -> list[FakeEngine]:
    """On hosts of their own, as pods are, so that both can publish on the same ports."""
    for engine, host in zip(engines, (own_host(1), own_host(2)), strict=True):
        await engine.stop()
        engine.host, engine.port = host, 0
        await engine.start()
    return engines


@pytest.fixture
def publishers() -> Iterator[list[Publisher]]:
    """Of `engines_apart`."""
    with (
        publishing(host=own_host(1)) as one,
        publishing(one.event_port, one.replay_port, host=own_host(2)) as two,
    ):
        yield [one, two]


class OneService:
    """A cluster of which a dedicated router follows one service's slices."""

    def __init__(self, slices: ObjectApi) -> None:
        self._slices = slices

    def slices_of(self, service: ServiceReference) -> ObjectApi:
        return self._slices

    def slices(self, namespace: str | None) -> ObjectApi:
        raise AssertionError("a dedicated router asks for one service's slices only")

    inference_services = slices


StartRouter = Callable[..., Awaitable[RunningRouter]]


@pytest.fixture
async def start_router(exit_stack: AsyncExitStack) -> StartRouter:
    """start_router(*engines, **config): a router with short intervals that has found its ready engines. `tuned` are
    fields of its Tuning.
    """

    async def start(
        *engines: FakeEngine,
        slice_api: ObjectApi | None = None,
        kubernetes: Kubernetes | None = None,
        router_secret: str | None = None,
        tuned: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RunningRouter:
        values: dict[str, Any] = {
            "port": 0,
            "admin_port": 0,
            "endpoint": tuple(engine.url for engine in engines),
            "probe_interval": 0.05,
            "shutdown_delay": 0.01,
            "shutdown_timeout": 5.0,
            "max_queue_wait": 5.0,
        }
        config = RouterConfig(**values | options)
        if slice_api is not None:
            kubernetes = OneService(slice_api)
        router = await exit_stack.enter_async_context(running(config, kubernetes, router_secret, Tuning(**tuned or {})))
        await _until(lambda: router.is_ready)
        if kubernetes is not None:
            return router
        num_ready = sum(engine.is_ready and engine.is_running for engine in engines)
        await _until(lambda: router.services.num_in_state(EndpointState.READY) == num_ready)
        if num_ready:
            await _until(lambda: router.services.of(None).registry.can_place(None))
        return router

    return start


@pytest.fixture
async def client(exit_stack: AsyncExitStack) -> aiohttp.ClientSession:
    return await exit_stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
