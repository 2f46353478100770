"""How long clients may take: for a head, for a body, to read, and between two requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClientTimes:
    """Seconds, where nothing else is said."""

    head: float = 30.0
    """To the end of a request's head: from the connection, or from the first byte after the last request."""
    body: float = 30.0
    """For a request's body, and one more for every `body_bytes_per_second` that have come."""
    body_bytes_per_second: float = 64 * 1024
    reader: float = 60.0
    """For a full write buffer to drain to a quarter, and for all of it once the connection is to close."""
    keepalive: float = 75.0
    """That a connection is kept after an answer."""
    next_request: float = 0.5
    """While a server drains: from the end of an answer to the client's next request, if it has one."""


CLIENT_TIMES = ClientTimes()
