"""What one client's connection may take of a server: time for each thing that it does, and bytes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """A server that bounds more of its clients adds it."""

    head_seconds: float = 30.0
    """To the end of a request's head, from the connection or from the head's first byte; also for the rest of a body
    that was answered before."""
    keep_alive_seconds: float = 75.0
    """Between an answer and the next request: longer than the pools of usual clients and proxies keep a connection, so
    that they close it and never we."""
    reader_seconds: float = 60.0
    """For a full write buffer to drain, and for whatever is left of it once the connection is to close."""
    reader_bytes: int = 1024 * 1024
    """Of a longer buffer, as a large answer leaves it, so much is to be taken each time: 0.14 Mbit/s."""
    linger_seconds: float = 5.0
    """For a client that still sends when its last answer is written."""
    linger_bytes: int = 16 * 1024 * 1024
    """That it may send meanwhile."""
