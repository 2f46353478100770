"""The sockets between the engine core and its ranks: ZMQ PUSH/PULL.

The core binds all of them: one hears all ranks, and one speaks to each. On one node they are ipc sockets. Among
several nodes they listen on TCP at ports that the store tells, let in only who has the service's secret where there is
one, and both sides notice when the other has gone: on one node the kernel tells, and nobody else can open the sockets.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvasir_runtime.engine.channel import LINGER_MILLISECONDS, ipc_address
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.heartbeat import BEAT_SECONDS, SILENT_SECONDS
from kvasir_runtime.ranks.messages import FromRank, ToRank, encoder, from_rank_decoder, to_rank_decoder
from kvasir_runtime.service_secret import SECRET_VARIABLE, CurveKeys, guard, identify

WELCOME_SECONDS = 30.0
"""How long a rank waits to be let in by the core, which listens already."""
PeerEvent = Literal["came", "refused", "went"]
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True)
class LinkAddresses:
    core: str
    ranks: tuple[str, ...]
    transfers: tuple[str, ...]
    """Of the same ranks' transfer threads."""

    @property
    def is_network(self) -> bool:
        return self.core.startswith("tcp:")


def ipc_addresses(folder: Path, num_ranks: int) -> LinkAddresses:
    """On one node."""
    ranks = tuple(ipc_address(folder / f"rank-{rank}") for rank in range(num_ranks))
    transfers = tuple(ipc_address(folder / f"kv-{rank}") for rank in range(num_ranks))
    return LinkAddresses(ipc_address(folder / "core"), ranks, transfers)


def network_addresses(host: str, num_ranks: int) -> LinkAddresses:
    """At ports that the system chooses; `host` is an IP address of node 0."""
    anywhere = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
    return LinkAddresses(anywhere, (anywhere,) * num_ranks, (anywhere,) * num_ranks)


class CoreLinks:
    """The engine core's ends. `send` may be called from any thread, `receive` from one."""

    def __init__(self, addresses: LinkAddresses, keys: CurveKeys | None = None) -> None:
        """`keys`: of those who are let in; None: everybody. Raises ZMQError where this node cannot listen."""
        self.lost_ranks: set[int] = set()
        """Whose connection has ended."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys
        self._pull = self._guarded(zmq.PULL)
        self._pushes = [self._guarded(zmq.PUSH) for _ in addresses.ranks]
        self.transfers = [self._guarded(zmq.PAIR) for _ in addresses.transfers]
        """For the transfer agent alone, to a rank's transfer thread each."""
        self._monitors = [PeerMonitor(push, tells_who_came=False) for push in self._pushes]
        self._order = threading.Lock()
        """All ranks are sent the same in the same order, whoever sends."""
        self._encoder = encoder()
        self._decoder = from_rank_decoder()
        self._bind(addresses)

    @property
    def bound(self) -> LinkAddresses:
        """With the ports that the system chose."""
        return LinkAddresses(_end(self._pull), tuple(map(_end, self._pushes)), tuple(map(_end, self.transfers)))

    @property
    def num_ranks(self) -> int:
        return len(self._pushes)

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
        for waker in (self._pull, *(monitor.socket for monitor in self._monitors), *wakers):
            poller.register(waker, zmq.POLLIN)
        poller.poll(max(1, round(timeout_seconds * 1000)))
        self.lost_ranks |= {rank for rank, monitor in enumerate(self._monitors) if "went" in monitor.events()}
        messages: list[FromRank] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        with self._order:
            for monitor in self._monitors:
                monitor.close()
            for socket in (self._pull, *self._pushes, *self.transfers):
                socket.close(linger=0)
            self._context.term()

    def _guarded(self, kind: int) -> zmq.Socket[bytes]:
        socket = _socket(self._context, kind)
        guard(socket, self._keys)
        return socket

    def _bind(self, addresses: LinkAddresses) -> None:
        ends = zip((self._pull, *self._pushes, *self.transfers), _all(addresses), strict=True)
        try:
            for socket, address in ends:
                socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise


class RankLinks:
    """A rank's ends. `receive` may be called from one thread, `send` and `has_core_gone` from any."""

    def __init__(
        self,
        addresses: LinkAddresses,
        rank: int,
        keys: CurveKeys | None = None,
        welcome_seconds: float = WELCOME_SECONDS,
    ) -> None:
        """Over a network waits so long for the core to let this rank in. Raises RankFailedError."""
        self._one_at_a_time = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = _socket(self._context, zmq.PULL)
        self._push = _socket(self._context, zmq.PUSH)
        self._push.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._monitor = PeerMonitor(self._pull, tells_who_came=True) if addresses.is_network else None
        self._has_core_gone = False
        for socket, address in ((self._pull, addresses.ranks[rank]), (self._push, addresses.core)):
            identify(socket, keys)
            socket.connect(address)
        if self._monitor is not None:
            self._await_welcome(self._monitor, addresses.ranks[rank], welcome_seconds)
        self._encoder = encoder()
        self._decoder = to_rank_decoder()

    def receive(self) -> ToRank:
        """The next message; sleeps until there is one."""
        return self._decoder.decode(self._pull.recv())

    def has_core_gone(self) -> bool:
        """Over a network; on one node a rank follows its parent's life."""
        with self._one_at_a_time:
            if self._monitor is not None and not self._push.closed:
                self._has_core_gone |= "went" in self._monitor.events()
            return self._has_core_gone

    def _await_welcome(self, monitor: "PeerMonitor", address: str, seconds: float) -> None:
        events = monitor.events() if monitor.socket.poll(round(seconds * 1000)) else []
        if "came" in events:
            self._has_core_gone = "went" in events
            return
        self.close()
        if events:
            raise RankFailedError(
                f"node 0 refuses this rank at {address}: start all nodes with the same {SECRET_VARIABLE}, or none of "
                "them with one, and of the same version"
            )
        raise RankFailedError(
            f"node 0 has not answered at {address} in {seconds:g} s; ranks must reach every port of node 0"
        )

    def send(self, message: FromRank) -> None:
        """Nothing once the links are closed: the process ends, and other threads may not have heard of it."""
        payload = self._encoder.encode(message)
        with self._one_at_a_time:
            if not self._push.closed:
                self._push.send(payload, zmq.NOBLOCK)

    def close(self) -> None:
        """Waits up to a second until the core has taken what was sent."""
        with self._one_at_a_time:
            if self._monitor is not None:
                self._monitor.close()
            self._push.close()
        self._pull.close(linger=0)
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


def _all(addresses: LinkAddresses) -> tuple[str, ...]:
    return addresses.core, *addresses.ranks, *addresses.transfers


def _end(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class PeerMonitor:
    """Who came to a socket, who was refused and who went, by ZMQ's own events.

    Somebody who is refused, since they lack the secret or speak another protocol (a port scan), never came, and so
    cannot go. ZMQ tells of a refusal and of the connection's end in one breath, on its one thread.
    """

    def __init__(self, watched: zmq.Socket[bytes], *, tells_who_came: bool) -> None:
        """Before the socket is bound or connected, or its first events are missed."""
        arrivals = zmq.EVENT_HANDSHAKE_SUCCEEDED if tells_who_came else 0
        self.socket = watched.get_monitor_socket(arrivals | _REFUSALS | zmq.EVENT_DISCONNECTED)
        """Readable when there are events."""
        self._watched = watched
        self._is_refused = False

    def events(self) -> list[PeerEvent]:
        """All since the last call."""
        events: list[PeerEvent] = []
        while True:
            try:
                message = parse_monitor_message(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return events
            if (event := self._event(message["event"])) is not None:
                events.append(event)

    def _event(self, kind: int) -> PeerEvent | None:
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return "came"
        was_refused, self._is_refused = self._is_refused, kind != zmq.EVENT_DISCONNECTED
        if kind != zmq.EVENT_DISCONNECTED:
            return "refused"
        return None if was_refused else "went"

    def close(self) -> None:
        """Before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
