"""The wire between API processes and engine cores: ZMQ PUSH/PULL over ipc sockets, msgspec msgpack.

Core c binds `ipc://<dir>/core-<c>`, API process i binds `ipc://<dir>/api-<i>-<c>` for each core, and each side connects
a PUSH to the other's, so start order does not matter. Both ends sleep in the kernel while nothing arrives. Queues are
unbounded: a slow API process must never hold up the engine's step, and admission bounds how many sequences can be under
way.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from kvasir_runtime.engine.messages import FromCore, ToCore, Wake
from kvasir_runtime.errors import ConfigurationError, EngineDeadError

LAST_WORDS_SECONDS = 2.0
"""How long an API process listens for an EngineFailed after the core's connection broke."""
LINGER_MILLISECONDS = 1000
"""How long `close` waits for last words (EngineFailed, AbortRequests) to be taken over by the kernel."""
MAX_SOCKET_PATH_BYTES = 107
"""Of a UNIX socket's address on Linux (sun_path, unix(7))."""


T = TypeVar("T")


def core_address(ipc_dir: Path, data_rank: int) -> str:
    return ipc_address(ipc_dir / f"core-{data_rank}")


def api_address(ipc_dir: Path, api_index: int, data_rank: int) -> str:
    return ipc_address(ipc_dir / f"api-{api_index}-{data_rank}")


def ipc_address(path: Path) -> str:
    """Raises ConfigurationError when the system allows no such long path."""
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigurationError(
            f"socket path {path} has {len(str(path).encode())} bytes, but the system allows {MAX_SOCKET_PATH_BYTES}; "
            "set TMPDIR to a shorter folder"
        )
    return f"ipc://{path}"


def _bind_pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    return socket


def _connect_push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # milliseconds; the default of 100 would show in the start time
    socket.connect(address)
    return socket


def _receive_all(socket: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[T]) -> list[T]:
    """All messages that have arrived, without waiting."""
    messages: list[T] = []
    while True:
        try:
            messages.append(decoder.decode(socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


class CoreChannel:
    """The engine core's end. Blocking; used from one thread."""

    def __init__(self, ipc_dir: Path, api_server_count: int, data_rank: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = _bind_pull(self._context, core_address(ipc_dir, data_rank))
        self._pushes = {
            index: _connect_push(self._context, api_address(ipc_dir, index, data_rank))
            for index in range(api_server_count)
        }
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)

    def receive(self, timeout_seconds: float | None) -> list[ToCore]:
        """All messages that have arrived, in order; waits up to the timeout for the first (None: for ever, 0: not)."""
        messages = _receive_all(self._pull, self._decoder)
        if messages or timeout_seconds == 0:
            return messages
        self._pull.poll(None if timeout_seconds is None else max(1, round(timeout_seconds * 1000)))
        return _receive_all(self._pull, self._decoder)

    def send(self, api_index: int, message: FromCore) -> None:
        if (push := self._pushes.get(api_index)) is not None:
            push.send(self._encoder.encode(message), zmq.NOBLOCK)

    def broadcast(self, message: FromCore) -> None:
        payload = self._encoder.encode(message)
        for push in self._pushes.values():
            push.send(payload, zmq.NOBLOCK)

    def forget(self, api_index: int) -> None:
        """Send nothing more to an API process that has died, and keep nothing for it."""
        if (push := self._pushes.pop(api_index, None)) is not None:
            push.close(linger=0)

    def close(self) -> None:
        """Waits up to a second until the other side has taken what was sent."""
        self._pull.close(linger=0)
        for push in self._pushes.values():
            push.close()
        self._context.term()


class CoreWaker:
    """Ends the core's wait for messages, from one other thread of its process."""

    def __init__(self, ipc_dir: Path, data_rank: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = _connect_push(self._context, core_address(ipc_dir, data_rank))
        self._payload = msgspec.msgpack.encode(Wake())

    def __call__(self) -> None:
        self._push.send(self._payload, zmq.NOBLOCK)

    def close(self) -> None:
        """After the other thread has ended."""
        self._push.close(linger=0)
        self._context.term()


def tell_api_processes(ipc_dir: Path, api_server_count: int, data_rank: int, message: FromCore) -> None:
    """For a core that cannot speak any more; takes up to a second until the other side has taken it."""
    _tell([api_address(ipc_dir, index, data_rank) for index in range(api_server_count)], message)


def tell_cores(ipc_dir: Path, num_cores: int, message: ToCore) -> None:
    """For an API process that cannot speak any more; takes as long."""
    _tell([core_address(ipc_dir, data_rank) for data_rank in range(num_cores)], message)


def _tell(addresses: list[str], message: FromCore | ToCore) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    payload = msgspec.msgpack.encode(message)
    for address in addresses:
        push = _connect_push(context, address)
        push.send(payload, zmq.NOBLOCK)
        push.close()
    context.term()


class EngineChannel:
    """An API process's end of one core's, for one event loop.

    It waits on the PULL socket's own descriptor rather than through `zmq.asyncio`, which makes a future and a poll
    per message. The kernel tells of a core that dies in any way, because its connection breaks.
    """

    def __init__(self, ipc_dir: Path, api_index: int, data_rank: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = _bind_pull(self._context, api_address(ipc_dir, api_index, data_rank))
        self._push = _connect_push(self._context, core_address(ipc_dir, data_rank))
        self._monitor = self._push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_core_gone = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    async def receive(self) -> list[FromCore]:
        """At least one message, in order of arrival. One task at a time may wait here.

        Raises EngineDeadError when the core has gone and all that it sent has been received.
        """
        while not (messages := _receive_all(self._pull, self._decoder)):
            if self._is_core_gone:
                raise EngineDeadError(
                    "the engine core process has ended without a word; its log, or the kernel's for a process killed "
                    "for memory, says why"
                )
            if self._has_disconnected():
                self._is_core_gone = True
                await self._wait_for_last_words()
            else:
                await self._wait_readable()
        return messages

    def _has_disconnected(self) -> bool:
        try:
            self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def _wait_for_last_words(self) -> None:
        """The core's own, or of its end, which is known once the process is gone as a whole."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                while not self._pull.poll(0):
                    await self._wait_readable()

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptors = self._pull.fileno(), self._monitor.fileno()
        for descriptor in descriptors:
            loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    def send(self, message: ToCore) -> None:
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Waits up to a second until the core has taken what was sent."""
        self._push.disable_monitor()
        self._monitor.close(linger=0)
        self._pull.close(linger=0)
        self._push.close()
        self._context.term()
