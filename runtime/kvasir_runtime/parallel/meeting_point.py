"""Where ranks find each other: a file on one machine, a server on node 0 among several. No torch: parents name it."""

import socket
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    file: Path | None = None
    """None: the server."""
    host: str = LOOPBACK
    port: int = 0

    @property
    def own_address(self) -> str:
        """Of this machine, as the others reach it."""
        if self.file is not None:
            return LOOPBACK
        family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # connecting a datagram socket sends nothing
            probe.connect(address)
            own: str = probe.getsockname()[0]
        return own
