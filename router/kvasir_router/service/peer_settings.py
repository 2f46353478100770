"""How routers find one another, and for how long they are believed. Without ZMQ, so that every router may import it."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvasir_router.config import HostPort


async def addresses_of(where: HostPort) -> set[str]:
    """By the name's A and AAAA records, as ZMQ writes them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    return {zmq_address(str(info[4][0]), where.port) for info in found}


def zmq_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True)
class PeerSettings:
    lifetime_seconds: float = 3.0
    """Of what a peer has told, since its last message."""
    heartbeat_seconds: float = 1.0
    resolve_seconds: float = 5.0
    ping_seconds: float = 5.0
    dead_seconds: float = 15.0
    """Without an answer to a ping: a vanished node closes no connection."""
    max_warnings: int = 100
    """Who is not heard chooses its name."""
    resolve: Callable[[HostPort], Awaitable[set[str]]] = addresses_of


PEER_SETTINGS = PeerSettings()
