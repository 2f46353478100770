"""How long one client may take for what it sends and reads, and how much a process holds for clients meanwhile."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    head_seconds: float = 30.0
    """From a head's first byte, and from the connection, to the head's end."""
    body_seconds: float = 60.0
    """For all of a body: 8 MiB at 1.1 Mbit/s."""
    reader_seconds: float = 60.0
    """For a full write buffer to drain, and for whatever is left of it once the connection is to close."""
    reader_bytes: int = 1024 * 1024
    """Of a longer buffer, as a large answer leaves it, so much is to be taken each time: 0.14 Mbit/s."""
    linger_seconds: float = 5.0
    """For a client that still sends when its last answer is written."""
    linger_bytes: int = 16 * 1024 * 1024
    """That it may send meanwhile."""
    held_bytes: int = 1024 * 1024 * 1024
    """Of all bodies together, but two of the largest in any case: 256 KiB, which are the tokens of a long conversation,
    for each connection that a process takes."""


CLIENT_LIMITS = ClientLimits()
