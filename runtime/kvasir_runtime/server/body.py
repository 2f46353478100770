"""A request's body: how it is read, no more and no longer than the server is willing to, and how it becomes a model.

pydantic's findings become one sentence that a client can act on.
"""

import asyncio
import difflib
import json
import logging
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_http.connections import ClientLimits
from kvasir_runtime.errors import InvalidRequestError, ServerUnavailableError
from kvasir_runtime.flags import NEAR
from kvasir_runtime.server.errors import BodyTimeoutError, BodyTooLargeError
from kvasir_runtime.server.foreign_fields import HINTS, Body

logger = logging.getLogger(__name__)
MAX_SHOWN_INPUT = 80  # characters of a wrong value that an error repeats
MAX_LISTED_ERRORS = 1000
"""Describing one takes some 15 us, and nothing else runs meanwhile."""
Model = TypeVar("Model", bound=Body)
MAX_NAMED_HINTS = 1024
"""After so many, the log gives only names that are known, since clients choose the others."""
_named_hints: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits(ClientLimits):
    """How long a client of the engine may take, and what a process holds for all, beside what `kvasir_http` says."""

    body_seconds: float = 60.0
    """For all of a body: 8 MiB at 1.1 Mbit/s."""
    held_bytes: int = 1024 * 1024 * 1024
    """Of all bodies together, but two of the largest in any case: 256 KiB, which are the tokens of a long conversation,
    for each connection that a process takes."""


API_LIMITS = ApiLimits()


async def read_body(request: Request, max_bytes: int, max_seconds: float) -> bytes:
    """Raises BodyTooLargeError, BodyTimeoutError, and ClientDisconnect when the client leaves before its end."""
    try:
        async with asyncio.timeout(max_seconds):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeoutError(f"the body has not come within {max_seconds:g} seconds; send it faster") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(declared, max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(f"more than {num_bytes - 1}", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(seen: str, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {seen} bytes, but this server reads at most {max_bytes} (--max-body-bytes); send less"
    )


class BodyBudget:
    """What all bodies that one API process holds may have together, whoever sends them and however slowly they come.

    A body counts from its first byte until its request is answered, since what is made of it is held as long and is no
    smaller. The body that would be too much is answered with 503 at once; what still comes of it is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ServerUnavailableError, and takes nothing, where that is too much."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ServerUnavailableError(
                f"this server holds {self.num_bytes} bytes of requests and takes no more than {self._max_bytes}; "
                "send the request to another replica, or later"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class BodyBudgetMiddleware:
    """Counts what is received, within the place where errors become answers. What is sent passes it by."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_taken = 0

        async def receive_within_budget() -> Message:
            nonlocal num_taken
            message = await receive()
            if num_bytes := len(message.get("body", b"")):
                self._budget.take(num_bytes)
                num_taken += num_bytes
            return message

        try:
            await self._app(scope, receive_within_budget, send)
        finally:
            self._budget.give_back(num_taken)


def parse(model: type[Model], body: bytes) -> Model:
    """Raises InvalidRequestError that names the field, what was seen and what is expected."""
    hints: set[str] = set()
    try:
        wishes = model.model_validate_json(body, context=hints)
    except ValidationError as error:
        raise _invalid(model, error, body) from error
    wishes.check_wishes()
    _name_once(hints)
    return wishes


def checked(model: type[Model], values: dict[str, Any]) -> Model:
    """What another API's request comes to, in the words of this one. Raises InvalidRequestError as `parse`."""
    try:
        wishes = model.model_validate(values)
    except ValidationError as error:
        raise _invalid(model, error) from error
    wishes.check_wishes()
    return wishes


def _invalid(model: type[Body], error: ValidationError, body: bytes = b"") -> InvalidRequestError:
    if error.error_count() > MAX_LISTED_ERRORS:
        return InvalidRequestError(
            f"{error.error_count()} fields of the request are unknown or wrong, too many to name one; "
            "send only fields that this route has"
        )
    details = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":
        return _malformed_body(body, details[0])
    return _invalid_field(model, details)


def _name_once(hints: set[str]) -> None:
    new = hints - _named_hints
    if len(_named_hints) > MAX_NAMED_HINTS:
        new &= HINTS
    if new:
        _named_hints.update(new)
        logger.info("clients send fields that mean nothing here: %s", ", ".join(sorted(new)))


def _malformed_body(body: bytes, detail: ErrorDetails) -> InvalidRequestError:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return InvalidRequestError(
            f"the body is not valid UTF-8: byte 0x{body[error.start]:02x} at position {error.start} ({error.reason}); "
            "send JSON encoded as UTF-8"
        )
    return InvalidRequestError(f"the body is not valid JSON: {detail['ctx']['error']}; send one JSON object")


def _invalid_field(model: type[Body], details: list[ErrorDetails]) -> InvalidRequestError:
    """Of several errors the one that helps most: a thing we cannot do, an unknown key, the innermost wrong value."""
    unsupported = [detail for detail in details if detail["type"] == "unsupported"]
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    if unknown and not unsupported:
        return _unknown_fields(model, unknown)
    first = unsupported[0] if unsupported else max(details, key=lambda detail: _field_name(detail["loc"]).count("["))
    field = _field_name(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{field} is required, but it was not given", field)
    if not field:
        return InvalidRequestError(first["msg"], first["type"] if first["type"] in model.model_fields else None)
    if unsupported:
        return InvalidRequestError(f"{field}: {first['msg']}", field)
    same_field = (_expected(detail) for detail in details if _field_name(detail["loc"]) == field)
    expected = "; or ".join(dict.fromkeys(same_field))
    return InvalidRequestError(f"{field}: {_shown(first['input'])} was given, but {expected}", field)


def _unknown_fields(model: type[Body], details: list[ErrorDetails]) -> InvalidRequestError:
    location = details[0]["loc"]
    names = [str(detail["loc"][-1]) for detail in details]
    where = _field_name(location[:-1]) or "the request"
    close = difflib.get_close_matches(names[0], model.model_fields, 1, NEAR) if len(location) == 1 else []
    hint = f"did you mean {close[0]!r}?" if close else "leave it out or correct its name"
    message = f"unknown field {', '.join(repr(name) for name in names)} in {where}; {hint}"
    return InvalidRequestError(message, _field_name(location) or names[0])


def _field_name(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; pydantic's names for a union's branches are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("bool", "int", "str"):
            name += f".{part}" if name else part
    return name


def _expected(detail: ErrorDetails) -> str:
    return re.sub("^[A-Z][a-z]+ should", "it should", detail["msg"]).replace(" after validation", "")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_INPUT else f"{text[:MAX_SHOWN_INPUT]}..."
