"""Where an engine's ranks find each other: a file on one node, a server on node 0 among several. No torch: parents name
it."""

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

LOOPBACK = "127.0.0.1"
MEETING_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other: a large model on a slow disk loads minutes longer on one than on another."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    file: Path | None = None
    """None: the server."""
    host: str = LOOPBACK
    port: int = 0
    data_rank: int = 0
    """Of the engine, among those that share the server."""

    @property
    def is_on_one_node(self) -> bool:
        return self.file is not None

    @property
    def own_address(self) -> str:
        """Of this node, as the others reach it."""
        if self.file is not None:
            return LOOPBACK
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # connecting a datagram socket sends nothing
            probe.connect(address)
            own: str = probe.getsockname()[0]
        return own
