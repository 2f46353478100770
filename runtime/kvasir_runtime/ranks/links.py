"""The sockets between the engine core and its ranks: ZMQ PUSH/PULL.

The core binds all of them: one hears all ranks, and one speaks to each. On one machine they are ipc sockets. Among
several nodes they listen on TCP at ports that the store tells, and both sides notice when the other has gone: on one
machine the kernel tells.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvasir_runtime.engine.channel import LINGER_MILLISECONDS, ipc_address
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS
from kvasir_runtime.ranks.messages import FromRank, ToRank, encoder, from_rank_decoder, to_rank_decoder


@dataclass(frozen=True, slots=True)
class LinkAddresses:
    core: str
    ranks: tuple[str, ...]


def ipc_addresses(folder: Path, num_ranks: int) -> LinkAddresses:
    """On one machine."""
    ranks = tuple(ipc_address(folder / f"rank-{rank}") for rank in range(num_ranks))
    return LinkAddresses(ipc_address(folder / "core"), ranks)


def network_addresses(host: str, num_ranks: int) -> LinkAddresses:
    """At ports that the system chooses; `host` is an IP address of node 0."""
    anywhere = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
    return LinkAddresses(anywhere, (anywhere,) * num_ranks)


class CoreLinks:
    """The engine core's ends. `send` may be called from any thread, `receive` from one."""

    def __init__(self, addresses: LinkAddresses) -> None:
        """Raises ZMQError where this machine cannot listen."""
        self.lost_ranks: set[int] = set()
        """Whose connection has ended."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        try:
            self._pull.bind(addresses.core)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._pushes = [self._bound_push(address) for address in addresses.ranks]
        self._monitors = [push.get_monitor_socket(zmq.EVENT_DISCONNECTED) for push in self._pushes]
        self._order = threading.Lock()
        """All ranks are sent the same in the same order, whoever sends."""
        self._encoder = encoder()
        self._decoder = from_rank_decoder()

    @property
    def bound(self) -> LinkAddresses:
        """With the ports that the system chose."""
        ends = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self._pull, *self._pushes)]
        return LinkAddresses(ends[0], tuple(ends[1:]))

    def send(self, *messages: ToRank) -> None:
        """To all ranks. To one that has gone nothing is sent; that it has gone is noticed elsewhere."""
        with self._order:
            for message in messages:
                payload = self._encoder.encode(message)
                for push in self._pushes:
                    try:
                        push.send(payload, zmq.NOBLOCK)
                    except zmq.Again:
                        continue

    def receive(self, timeout_seconds: float, wakers: Sequence[int] = ()) -> list[FromRank]:
        """Messages that have arrived, in each rank's order; waits for the first, or until a descriptor is readable."""
        poller = zmq.Poller()
        for waker in (self._pull, *self._monitors, *wakers):
            poller.register(waker, zmq.POLLIN)
        poller.poll(max(1, round(timeout_seconds * 1000)))
        self.lost_ranks |= {rank for rank, monitor in enumerate(self._monitors) if _has_event(monitor)}
        messages: list[FromRank] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        with self._order:
            for push in self._pushes:
                push.disable_monitor()
            for socket in (self._pull, *self._pushes, *self._monitors):
                socket.close(linger=0)
            self._context.term()

    def _bound_push(self, address: str) -> zmq.Socket[bytes]:
        push = _socket(self._context, zmq.PUSH)
        push.bind(address)
        return push


class RankLinks:
    """A rank's ends. `receive` may be called from one thread, `send` from any."""

    def __init__(self, addresses: LinkAddresses, rank: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        self._monitor = None
        if addresses.core.startswith("tcp:"):
            self._monitor = self._pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._pull.connect(addresses.ranks[rank])
        self._push = _socket(self._context, zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._push.connect(addresses.core)
        self._one_at_a_time = threading.Lock()
        self._encoder = encoder()
        self._decoder = to_rank_decoder()

    def receive(self) -> ToRank:
        """The next message; sleeps until there is one. Raises RankFailedError when the core has gone."""
        if self._monitor is not None:
            self._wait(self._monitor)
        return self._decoder.decode(self._pull.recv())

    def _wait(self, monitor: zmq.Socket[bytes]) -> None:
        """Until there is a message."""
        if self._pull.poll(0):
            return
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        poller.poll()
        if not self._pull.poll(0) and _has_event(monitor):
            raise RankFailedError("the engine core has gone, or node 0 cannot be reached any more")

    def send(self, message: FromRank) -> None:
        payload = self._encoder.encode(message)
        with self._one_at_a_time:
            self._push.send(payload, zmq.NOBLOCK)

    def close(self) -> None:
        """Waits up to a second until the core has taken what was sent."""
        if self._monitor is not None:
            self._pull.disable_monitor()
            self._monitor.close(linger=0)
        self._pull.close(linger=0)
        self._push.close()
        self._context.term()


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Unbounded; over a network each side also asks whether the other is there, which the system leaves for hours."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(BEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENT_SECONDS * 1000))
    return socket


def _has_event(monitor: zmq.Socket[bytes]) -> bool:
    try:
        monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
