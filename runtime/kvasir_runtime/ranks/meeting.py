"""How ranks of other nodes learn where their engine core listens: node 0 writes it into the store where they all meet.

Several engines share the store, which the core of the first one hosts.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq
from torch.distributed import Store  # type: ignore[attr-defined]

from kvasir_runtime.errors import ConfigurationError, RankFailedError
from kvasir_runtime.parallel.groups import host_meeting, open_meeting
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.ranks.links import CoreLinks, LinkAddresses, network_addresses
from kvasir_runtime.service_secret import CurveKeys

_KEY = "links"


@contextmanager
def told_links(point: MeetingPoint, num_ranks: int, keys: CurveKeys | None) -> Iterator[CoreLinks]:
    """Links that listen at an address of node 0 (`keys`: of CoreLinks), told by the store. Raises ConfigurationError,
    and RankFailedError where the first engine does not host it."""
    try:
        address = str(socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)[0][4][0])
        store = host_meeting(address, point.port) if point.data_rank == 0 else open_meeting(point, num_ranks)
        links = CoreLinks(network_addresses(address, num_ranks), keys)
    except (OSError, zmq.ZMQError) as error:
        raise ConfigurationError(
            f"--master-addr is {point.host}, where this node cannot listen: {error}; give an address of node 0"
        ) from error
    try:
        store.set(_KEY, msgspec.json.encode(links.bound).decode())
        yield links
    finally:
        links.close()


def told_addresses(store: Store) -> LinkAddresses:
    """Waits until node 0 has told them. Raises RankFailedError."""
    try:
        told = store.get(_KEY)
    except RuntimeError as error:  # torch has no narrower one
        raise RankFailedError(
            f"node 0 has not said where it listens: {error}; its log says why it does not start"
        ) from error
    return msgspec.json.decode(told, type=LinkAddresses)
