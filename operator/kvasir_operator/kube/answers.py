"""Answers of the API server, and none at all, as this package's own errors."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec

from kvasir_operator.errors import (
    AdmissionFailedError,
    KindNotServedError,
    KubeApiError,
    KubeForbiddenError,
    KubeUnavailableError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
    ServerFailedError,
    WatchExpiredError,
    described,
)

_ERRORS: dict[int, type[KubeApiError]] = {
    403: KubeForbiddenError,
    404: ObjectNotFoundError,
    409: ObjectConflictError,
    410: WatchExpiredError,
}
_MOST_SHOWN = 200  # bytes of an answer
_LATER = frozenset({401, 408, 429, 502, 503, 504})
"""Says nothing of an object: the same request may succeed when it is repeated."""
# A webhook's answer may have any status; one that does not answer is the API server's own error 500.
_ADMISSION = re.compile(
    r"failed calling webhook|admission webhook \S+ denied|(Validating|Mutating)AdmissionPolicy|policy '.*' with binding"
)


@contextmanager
def translated() -> Iterator[None]:
    """What a request within raises, and what reading its answer does."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise KubeUnavailableError(f"the API server did not answer: {described(error)}") from error


def api_error(status: int, reason: str, body: str) -> KubeApiError:
    """Our own error for an answer of the API server that is none of success."""
    try:
        status_object = json.loads(body)
        message, names_object = str(status_object["message"]), bool((status_object.get("details") or {}).get("name"))
    except (ValueError, TypeError, KeyError):
        message, names_object = f"{status} {reason}", False
    if _ADMISSION.search(message):
        return AdmissionFailedError(message, status)
    if status == 404 and not names_object:
        return KindNotServedError(f"the API server does not serve this kind: {message}", status)
    return (_ERRORS.get(status) or _of_class(status))(message, status)


def _of_class(status: int) -> type[KubeApiError]:
    """Of statuses without an error of their own: 405 of a kind whose CRD is being deleted, 413, 422, a proxy's."""
    if status in _LATER or not 400 <= status < 600:
        return KubeUnavailableError
    return ObjectRefusedError if status < 500 else ServerFailedError


def read_object(body: bytes, key: str | None = None) -> dict[str, Any]:
    """What something else answers in the API server's place may be JSON and none of its objects, which have `key`.

    Raises KubeUnavailableError.
    """
    found = msgspec.json.decode(body)
    if not isinstance(found, dict) or (key is not None and not isinstance(found.get(key), dict)):
        raise KubeUnavailableError(f"the API server answered what is none of its objects: {body[:_MOST_SHOWN]!r}")
    return found


def read_watch_line(line: bytes) -> dict[str, Any]:
    """One event of a watch; raises WatchExpiredError or KubeUnavailableError for one that says so, or is none."""
    event = read_object(line, "object")
    if event.get("type") == "ERROR":
        status = event["object"]
        error = WatchExpiredError if status.get("code") == 410 else KubeUnavailableError
        raise error(str(status.get("message")), status.get("code"))
    return event
