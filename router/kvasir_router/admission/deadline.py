"""A client's own limit to the time that its request may wait here, from a header."""

import math
from collections.abc import Iterable

from kvasir_router.errors import InvalidDeadlineError

DEADLINE_HEADER = "x-kvasir-deadline-seconds"


def deadline_seconds_of(raw_headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """None where the client sets none. Raises InvalidDeadlineError (400)."""
    value = next((value for name, value in raw_headers if name == DEADLINE_HEADER.encode()), None)
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidDeadlineError(
            f"{DEADLINE_HEADER}: {value.decode('latin-1')!r} is not a positive number of seconds; write for example 2.5"
        )
    return seconds
