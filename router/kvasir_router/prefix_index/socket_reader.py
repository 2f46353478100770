"""A ZMQ socket on the event loop, without a task: its messages are handed on as they come, a few a turn."""

import asyncio
import logging
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

MESSAGES_A_TURN = 32
"""Then everything else on the event loop has its turn."""


class SocketReader:
    """Owns the socket, from now to `close`; made on the running event loop."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)
        # The descriptor tells of changes only: what has come already must be looked for.
        self._next_turn: asyncio.Handle | None = self._loop.call_soon(self._take_turn)

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        """May be called while a message is handed on, which is the last one then."""
        if self.is_closed:
            return
        self._loop.remove_reader(self._fd)
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._socket.close(linger=0)

    def _on_readable(self) -> None:
        if self._next_turn is None:
            self._read()

    def _take_turn(self) -> None:
        self._next_turn = None
        self._read()

    def _read(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hand_on(message)
            if self.is_closed:
                return
        self._next_turn = self._loop.call_soon(self._take_turn)

    def _hand_on(self, message: list[bytes]) -> None:
        try:
            self._on_message(message)
        except Exception:  # one message that we cannot handle must not end the reading of all others
            logger.exception("a message of %d frames from an engine was not handled", len(message))
