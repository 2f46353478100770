"""How many clients' connections a server holds, in all and of one peer.

A connection is idle unless a request's whole head has come and its answer is not over. Where there are too many, the
longest idle makes way, so that whoever opens connections and asks nothing shuts nobody out; where none is idle, the
newcomer is refused.
"""

import ipaddress
import resource
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

# Of the process, for what is no client's connection.
_SPARE_DESCRIPTORS = 128
# A host has a whole network of this size, and may take any address in it.
_IPV6_HOST_PREFIX = 64


class Connection(Protocol):
    peer: str

    def close(self) -> None: ...

    def refuse_for_lack_of_room(self) -> None: ...


@dataclass(frozen=True)
class ConnectionLimits:
    total: int
    per_peer: int


class Connections:
    """Those of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._num_of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Counts it, or refuses it."""
        self._open.add(connection)
        self._num_of_peer[connection.peer] += 1
        self._idle[connection] = None
        if self._num_of_peer[connection.peer] > self._limits.per_peer:
            self._make_way(connection, connection.peer)
        elif len(self._open) > self._limits.total:
            self._make_way(connection, None)

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: Connection) -> None:
        """It may have been forgotten before, when it made way."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._idle.pop(connection, None)
        self._num_of_peer[connection.peer] -= 1
        if not self._num_of_peer[connection.peer]:
            del self._num_of_peer[connection.peer]

    def _make_way(self, newcomer: Connection, peer: str | None) -> None:
        """The newcomer is idle too, and the last of all."""
        longest_idle = next(one for one in self._idle if peer is None or one.peer == peer)
        self.closed(longest_idle)
        if longest_idle is newcomer:
            newcomer.refuse_for_lack_of_room()
        else:
            longest_idle.close()


@lru_cache(maxsize=4096)
def peer_of(host: str) -> str:
    """Whom an address belongs to, as far as it tells."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address.packed, _IPV6_HOST_PREFIX), strict=False))


def possible_connections(wanted: int) -> int:
    """As many as the process may have descriptors for, one of the client and one of an engine each.

    Raises the process's limit as far as it is allowed to.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (hard - _SPARE_DESCRIPTORS) // 2))
