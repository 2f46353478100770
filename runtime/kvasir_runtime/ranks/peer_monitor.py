"""Who came to a socket, who was refused and who went, by ZMQ's own events.

Somebody who is refused, since they lack the secret or speak another protocol (a port scan), never came, and so cannot
go. ZMQ tells of a refusal and of the connection's end in one breath, on its one thread.
"""

from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

PeerEvent = Literal["came", "refused", "went"]
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class PeerMonitor:
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
