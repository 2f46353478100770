"""The side channel of KV transfer: a ZMQ ROUTER that others ask, and a DEALER for each engine that is asked.

Messages are msgpack (messages.py). What cannot be decoded is of another version or of somebody else; it is logged and
dropped. With a secret only who has it is let in, and nobody else is asked. One poll waits for all sockets, and for
whoever wakes it from another thread.
"""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
import zmq

from kvasir_runtime.errors import ConfigurationError, KvTransferError
from kvasir_runtime.service_secret import CurveKeys, guard, identify
from kvasir_runtime.transfer.messages import FromKeeper, FromPuller
from kvasir_runtime.transfer.pulls import Endpoint

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
Message = TypeVar("Message")
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
WAKE_ADDRESS = "inproc://wake"
LINGER_MILLISECONDS = 500
"""How long a last word (`Done`) may take to be sent after hanging up."""


class Connection:
    """To one engine that is asked. It is closed at the first sign that the engine has gone."""

    def __init__(self, context: zmq.Context[Socket], endpoint: Endpoint, keys: CurveKeys | None) -> None:
        """Raises ZMQError where the endpoint can be none."""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # an engine that takes nothing is given up after seconds (pulls.py)
        self.socket.setsockopt(zmq.IPV6, 1)
        identify(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(_LOST)
        try:
            self.socket.connect(address_of(endpoint))
        except zmq.ZMQError:
            self.close()
            raise

    def is_lost(self) -> bool:
        try:
            self.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class SideChannel:
    """Used from one thread, but for `wake`."""

    def __init__(self, host: str, port: int, keys: CurveKeys | None = None) -> None:
        """Listens; port 0 is any that is free. `keys`: of all engines that talk here; None: anybody may. Raises
        ConfigurationError."""
        self._keys = keys
        self._context: zmq.Context[Socket] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.IPV6, 1)
        guard(self._router, keys)
        self._connections: dict[Endpoint, Connection] = {}
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind(WAKE_ADDRESS)
        self._wakes = self._context.socket(zmq.PAIR)
        self._wakes.connect(WAKE_ADDRESS)
        self._encoder = msgspec.msgpack.Encoder()
        self._from_puller: msgspec.msgpack.Decoder[FromPuller] = msgspec.msgpack.Decoder(FromPuller)
        self._from_keeper: msgspec.msgpack.Decoder[FromKeeper] = msgspec.msgpack.Decoder(FromKeeper)
        self._poller = zmq.Poller()
        for socket in (self._router, self._woken):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._router.bind(address_of((host, port)) if port else f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for other engines: {error}; give --kv-transfer-config another "
                "side_channel_host (an address of this machine) or side_channel_port"
            ) from error
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def wake(self) -> None:
        """End the wait of `poll`; from the one other thread that uses this."""
        with suppress(zmq.Again):  # a thousand wakes are waiting already
            self._wakes.send(b"", zmq.NOBLOCK)

    def poll(self, timeout_seconds: float | None) -> None:
        """Until something has come."""
        self._poller.poll(None if timeout_seconds is None else math.ceil(max(0.0, timeout_seconds) * 1000))
        while _received(self._woken) is not None:
            pass

    def asked(self) -> list[tuple[bytes, FromPuller]]:
        """Who asks what, all that has come."""
        questions: list[tuple[bytes, FromPuller]] = []
        while (frames := _received(self._router)) is not None:
            message = self._decoded(self._from_puller.decode, frames[-1], frames[0].hex())
            if message is not None:
                questions.append((frames[0], message))
        return questions

    def answered(self) -> list[tuple[Endpoint, FromKeeper]]:
        answers: list[tuple[Endpoint, FromKeeper]] = []
        for endpoint, connection in self._connections.items():
            while (frames := _received(connection.socket)) is not None:
                message = self._decoded(self._from_keeper.decode, frames[-1], str(endpoint))
                if message is not None:
                    answers.append((endpoint, message))
        return answers

    def lost(self) -> list[Endpoint]:
        """Engines whose connection broke, or that nothing listens at."""
        return [endpoint for endpoint, connection in self._connections.items() if connection.is_lost()]

    def ask(self, endpoint: Endpoint, message: FromPuller) -> None:
        """Raises KvTransferError where nobody can be at the endpoint: clients name it, and it may be any text."""
        connection = self._connections.get(endpoint)
        if connection is None:
            try:
                connection = self._connections[endpoint] = Connection(self._context, endpoint, self._keys)
            except zmq.ZMQError as error:
                raise KvTransferError(f"{endpoint[0]}:{endpoint[1]} is no address of an engine: {error}") from error
            self._poller.register(connection.socket, zmq.POLLIN)
            self._poller.register(connection.monitor, zmq.POLLIN)
        connection.socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def answer(self, puller: bytes, message: FromKeeper) -> None:
        """Dropped where the puller has gone."""
        self._router.send_multipart([puller, self._encoder.encode(message)], zmq.NOBLOCK)

    def hang_up(self, endpoint: Endpoint) -> None:
        connection = self._connections.pop(endpoint, None)
        if connection is not None:
            self._poller.unregister(connection.socket)
            self._poller.unregister(connection.monitor)
            connection.close()

    def close(self) -> None:
        for endpoint in list(self._connections):
            self.hang_up(endpoint)
        for socket in (self._router, self._woken, self._wakes):
            socket.close(linger=0)
        self._context.term()

    @staticmethod
    def _decoded(decode: Callable[[bytes], Message], payload: bytes, sender: str) -> Message | None:
        try:
            return decode(payload)
        except msgspec.DecodeError as error:
            logger.warning("a message of %d bytes from %s is not understood: %s", len(payload), sender, error)
            return None


def address_of(endpoint: Endpoint) -> str:
    host, port = endpoint
    return f"tcp://{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _received(socket: Socket) -> list[bytes] | None:
    """One message's frames; None: nothing has come."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
