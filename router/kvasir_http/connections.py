"""How many clients' connections a server holds, in all and of one peer.

A connection is idle unless a request's whole head has come and its answer is not over, or is yet to be read. Where
there are too many, the longest idle makes way, so that whoever opens connections and asks nothing shuts nobody out, and
probes get through; where none is idle, the newcomer is refused.
"""

import ipaddress
import resource
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

SPARE_DESCRIPTORS = 128
"""Of a process, for what is no client's connection."""
_IPV6_HOST_PREFIX = 64
"""A host has a whole network of this size, and may take any address in it."""


class Connection(Protocol):
    @property
    def peer(self) -> str: ...

    def abort(self) -> None: ...

    def refuse_for_lack_of_room(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    total: int
    per_peer: int

    def within(self, descriptors: int, per_connection: int = 1) -> "ConnectionLimits":
        """No more than a process may have descriptors. Where that is less than is wanted, one peer may still have no
        more than half."""
        total = (descriptors - SPARE_DESCRIPTORS) // per_connection
        if descriptors == resource.RLIM_INFINITY or total >= self.total:
            return self
        return ConnectionLimits(max(1, total), max(1, min(self.per_peer, total // 2)))


class Connections:
    """Those of one server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Those without a request whose answer has been taken, but for a little; the longest idle first."""
        self._num_of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: Connection) -> None:
        """Counts it, or refuses it."""
        self._open.add(connection)
        self._idle[connection] = None
        self._num_of_peer[connection.peer] += 1
        if self._num_of_peer[connection.peer] > self._limits.per_peer:
            self._make_way(connection, connection.peer)
        elif len(self._open) > self._limits.total:
            self._make_way(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """It may have made way, and been forgotten, before."""
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
            longest_idle.abort()  # a close would wait for a client that does not read


@lru_cache(maxsize=4096)
def peer_of(host: str) -> str:
    """Whom an address belongs to, as far as it tells."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:  # how a dual-stack socket sees IPv4
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address.packed, _IPV6_HOST_PREFIX), strict=False))


def most_descriptors() -> int:
    """That the system lets the process have, and that it takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
