"""A test's own ZMQ sockets, all closed at its end."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import parse_monitor_message

Socket = zmq.Socket[bytes]


class Sockets:
    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._open: list[Socket] = []

    def open(self, kind: int) -> Socket:
        self._open.append(self._context.socket(kind))
        return self._open[-1]

    def monitor(self, socket: Socket) -> "Disconnections":
        self._open.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        return Disconnections(self._open[-1])

    def close(self) -> None:
        for socket in self._open:
            socket.close(linger=0)
        self._context.term()


class Disconnections:
    """Of one socket."""

    def __init__(self, monitor: Socket) -> None:
        self._monitor = monitor
        self._has_come = False

    def __bool__(self) -> bool:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._has_come = self._has_come or event == zmq.EVENT_DISCONNECTED
        return self._has_come


@contextmanager
def zmq_sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    try:
        yield sockets
    finally:
        sockets.close()
