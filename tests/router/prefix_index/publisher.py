"""An engine's side of the sockets, as vLLM has it: a PUB that numbers its messages, and a ROUTER that repeats them.

What is published can be lost on the way on purpose; the buffer can be short, or the replay socket missing.
"""

import threading
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """`process` only makes messages of the same number differ."""

    def __init__(
        self, event_port: int = 0, replay_port: int = 0, *, process: float = 1.0, buffer_steps: int = 100,
        has_replay: bool = True, host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self._process = process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._bound(zmq.PUB, event_port, host)
        self._router = self._bound(zmq.ROUTER, replay_port, host)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self.num_messages = 0
        self._num_reports = 0
        self.event_port, self.replay_port = (_port(socket) for socket in (self._pub, self._router))
        self._thread = threading.Thread(target=self._serve_replays, args=(has_replay,))
        self._thread.start()

    def publish(self, *events: Any, is_lost: bool = False, rank: int | None = None) -> None:
        payload = msgspec.msgpack.encode([self._process, list(events), rank])
        number, self.num_messages = self.num_messages, self.num_messages + 1
        self._buffer.append((number, payload))
        if not is_lost:
            self.send(b"", number, payload)

    def begin_again(self, process: float) -> None:
        """As another process would, so quickly that no connection has broken."""
        self._process, self.num_messages = process, 0
        self._buffer.clear()

    def publish_load(self, instance: str, num_running: int = 0) -> None:
        self.send(b"kvasir-load", self._num_reports, load_frame(instance, num_running))
        self._num_reports += 1

    def send(self, topic: bytes, number: int, payload: bytes) -> None:
        self._pub.send_multipart((topic, number.to_bytes(8, "big"), payload))

    def send_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def close(self) -> None:
        self._pub.close(linger=0)
        self._context.term()
        self._thread.join()

    def _bound(self, kind: int, port: int, host: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"tcp://{host}:{port or '*'}")
        return socket

    def _serve_replays(self, has_replay: bool) -> None:
        try:
            while True:
                client, empty, start = self._router.recv_multipart()
                if not has_replay:
                    continue
                for number, payload in list(self._buffer):
                    if number >= int.from_bytes(start, "big"):
                        self._router.send_multipart((client, empty, number.to_bytes(8, "big"), payload))
                self._router.send_multipart((client, empty, END, b""))
        except zmq.ContextTerminated:
            self._router.close(linger=0)


@contextmanager
def publishing(*args: Any, **options: Any) -> Iterator[Publisher]:
    publisher = Publisher(*args, **options)
    try:
        yield publisher
    finally:
        publisher.close()


def load_frame(instance: str, num_running: int = 0, arrived: tuple[str, ...] = (), version: int = 1) -> bytes:
    return msgspec.msgpack.encode([version, num_running, 2, 300, 40, 5000, 60_000, 7.5, None, list(arrived), instance])


def stored(name: str, parent: str | None = None, block_size: int = 4) -> list[Any]:
    """One block, whose tokens are made of its name."""
    return [
        "BlockStored", [name.encode()], parent and parent.encode(), list(tokens_of(name, block_size)), block_size, None,
        "GPU",
    ]  # fmt: skip


def removed(*names: str) -> list[Any]:
    return ["BlockRemoved", [name.encode() for name in names], "GPU"]


def tokens_of(name: str, block_size: int = 4) -> "array[int]":
    return array("I", [*name.encode()][:1] * block_size)


def _port(socket: zmq.Socket[bytes]) -> int:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return int(address.rstrip(b"\0").rpartition(b":")[2])
