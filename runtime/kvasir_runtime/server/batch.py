"""A batch file in OpenAI's form: a request a line, and for each a line with its answer, as they come.

The requests are those of HTTP clients, sent to a server of this process, so a line is served, refused and worded as any
other request. Lines are read as there is room to ask, so that a file may be of any length.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Literal

import httpx2
import msgspec

logger = logging.getLogger(__name__)


class BatchRequest(msgspec.Struct):
    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, msgspec.Raw]


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Of a line that is no request: what a server refuses is an answer."""

    code: str
    message: str


class BatchAnswer(msgspec.Struct):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _Named(msgspec.Struct):
    custom_id: str | None = None


class BadLineError(Exception):
    """A line that is no request that could be sent."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class BatchCounts:
    num_answered: int = 0
    num_failed: int = 0
    """Among them, lines with an error, of ours or of the server."""


class Batch:
    def __init__(self, client: httpx2.AsyncClient, urls: Set[str], write: Callable[[bytes], object]) -> None:
        """`urls`: what may be asked; `write` takes a line, with its end."""
        self._client = client
        self._urls = urls
        self._write = write
        self._known: set[str] = set()
        """The custom_ids that came."""
        self.counts = BatchCounts()

    async def answer_all(self, lines: Iterable[bytes], num_at_once: int) -> BatchCounts:
        """Raises OSError where a line cannot be written, and httpx2.TransportError where the server has gone."""
        numbered = (pair for pair in enumerate(lines, 1) if pair[1].strip())
        async with asyncio.TaskGroup() as workers:
            for _ in range(num_at_once):
                workers.create_task(self._work(numbered))
        return self.counts

    async def _work(self, numbered: Iterator[tuple[int, bytes]]) -> None:
        for number, line in numbered:
            answer = await self._answer(number, line)
            self._write(msgspec.json.encode(answer) + b"\n")
            self.counts.num_answered += 1
            self.counts.num_failed += answer.response is None or answer.response.status_code != httpx2.codes.OK

    async def _answer(self, number: int, line: bytes) -> BatchAnswer:
        answer = BatchAnswer(f"batch_req_{uuid.uuid4().hex}", _custom_id(line), None, None)
        try:
            request = self._read(number, line)
        except BadLineError as error:
            answer.error = BatchError(error.code, str(error))
            return answer
        response = await self._client.post(
            request.url, content=msgspec.json.encode(request.body), headers={"content-type": "application/json"}
        )
        request_id = response.headers.get("x-request-id", "")
        answer.response = BatchResponse(response.status_code, request_id, msgspec.Raw(response.content))
        return answer

    def _read(self, number: int, line: bytes) -> BatchRequest:
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadLineError(
                "invalid_line",
                f"line {number} is no request: {error}; each line is an object with custom_id, method (POST), url and "
                "body",
            ) from error
        if request.url not in self._urls:
            raise BadLineError(
                "invalid_url",
                f"line {number}: url is {request.url!r}, but it should be one of {', '.join(sorted(self._urls))}",
            )
        if request.body.get("stream", b"null") not in (b"null", b"false"):
            raise BadLineError(
                "invalid_line", f"line {number}: stream is set, but a batch is answered whole; leave it out"
            )
        if request.custom_id in self._known:
            raise BadLineError(
                "duplicate_custom_id", f"line {number}: an earlier line has the custom_id {request.custom_id!r}, too"
            )
        self._known.add(request.custom_id)
        return request


def _custom_id(line: bytes) -> str | None:
    """Also of a line that is wrong otherwise."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
