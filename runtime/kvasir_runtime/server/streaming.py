"""Answers that end when their client leaves: whole ones, and streams of server-sent events.

Nothing is sent before the first event is there, so whatever goes wrong until then is answered with its own HTTP status;
what goes wrong later is an error event within the stream. A stream with a journal ends without [DONE] instead where the
engine is at fault, so that the router continues it elsewhere. A client that leaves cancels the work, and with it the
requests in the core.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvasir_runtime.errors import EngineDeadError, KvasirRuntimeError, ServerUnavailableError
from kvasir_runtime.server.errors import CLIENT_CLOSED_REQUEST, status_and_body
from kvasir_runtime.server.journal import RESUMABLE_HEADER
from kvasir_runtime.server.responses import DONE, to_event

T = TypeVar("T")
_ENGINE_LOST = (EngineDeadError, ServerUnavailableError)
"""Not the request's fault: another replica can go on."""


class ClientGoneError(Exception):
    """The client left before its answer was ready."""


async def answer(request: Request, work: Coroutine[Any, Any, bytes]) -> Response:
    """The JSON that the work comes to."""
    try:
        result = await _unless_disconnected(request.receive, work)
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(result, media_type="application/json")


async def event_stream(request: Request, events: AsyncGenerator[bytes, None], *, is_resumable: bool) -> Response:
    """Waits for the first event; raises what goes wrong until then."""
    try:
        first = await _unless_disconnected(request.receive, anext(events))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(first, events, is_resumable=is_resumable)


class EventStream(Response):
    """Owns the generator of events and closes it, however the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], *, is_resumable: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        if is_resumable:
            self.headers[RESUMABLE_HEADER] = "1"
        self._first = first
        self._events = events
        self._is_resumable = is_resumable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_disconnected(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._send_body(send, self._first)
        try:
            async for event in self._events:
                await self._send_body(send, event)
        except KvasirRuntimeError as error:
            if not (self._is_resumable and isinstance(error, _ENGINE_LOST)):
                await self._send_body(send, to_event(status_and_body(error)[1]) + DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_body(send: Send, body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled, and ClientGoneError raised, when the client leaves first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
