"""The sockets that routers listen to: KV events and load reports on one PUB, what was missed on a ROUTER.

Messages are vLLM's: [topic, sequence, payload], the sequence as 8 bytes big-endian, the payload msgpack. Publishing
never blocks: without a listener it costs a few microseconds, and what a slow one has not taken beyond `hwm` messages is
dropped for it alone, which it sees by the sequence. Sequences of events and of load reports are counted apart.
"""

import dataclasses
import errno
import time

import msgspec
import zmq

from kvasir_runtime.config import LOAD_TOPIC, KvEventsConfig
from kvasir_runtime.engine.load_report import LoadReport
from kvasir_runtime.engine.replay_buffer import ReplayBuffer
from kvasir_runtime.engine.replay_server import SEQUENCE_BYTES, ReplayServer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.events import EventBatch, KvEvent

MAX_INBOUND_BYTES = 1024
"""Of a message to us: a subscription, or a replay's first sequence."""
DEAD_PEER_MILLISECONDS = 30_000
"""After which a listener that does not acknowledge what it is sent is gone, and its queue with it."""
REPLAY_HWM = 1000
"""Messages that wait for one reader of a replay."""

Context = zmq.Context[zmq.Socket[bytes]]


class EventPublisher:
    """Of the engine core; used from its one thread."""

    def __init__(self, config: KvEventsConfig, data_parallel_rank: int | None = None) -> None:
        """Listens at once, a rank on the ports that are so much higher. Raises ConfigurationError where it cannot."""
        config = config if data_parallel_rank is None else at_rank(config, data_parallel_rank)
        self._data_parallel_rank = data_parallel_rank
        self._topic = config.topic.encode()
        self._num_batches = 0
        self._num_reports = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._context: Context = zmq.Context()
        self._buffer: ReplayBuffer | None = None
        self._replay_server: ReplayServer | None = None
        try:
            self._pub = bound_socket(self._context, zmq.PUB, config.endpoint, "endpoint", config.hwm)
            if config.replay_endpoint is not None:
                self._buffer = ReplayBuffer(config.buffer_steps, data_parallel_rank)
                router = bound_socket(self._context, zmq.ROUTER, config.replay_endpoint, "replay_endpoint", REPLAY_HWM)
                self._replay_server = ReplayServer(router, self._buffer)
        except ConfigurationError:
            self._context.destroy(linger=0)
            raise

    def publish_events(self, events: list[KvEvent]) -> None:
        payload = self._encoder.encode(EventBatch(time.time(), events, self._data_parallel_rank))
        if self._buffer is not None:
            self._buffer.append(self._num_batches, payload)
        self._send(self._topic, self._num_batches, payload)
        self._num_batches += 1

    def publish_load(self, report: LoadReport) -> None:
        self._send(LOAD_TOPIC.encode(), self._num_reports, self._encoder.encode(report))
        self._num_reports += 1

    def close(self) -> None:
        """What has not been taken by now is lost."""
        self._pub.close(linger=0)
        self._context.term()  # ends the replay server's wait
        if self._replay_server is not None:
            self._replay_server.join()

    def _send(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._pub.send_multipart((topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload), zmq.NOBLOCK)


def at_rank(config: KvEventsConfig, data_parallel_rank: int) -> KvEventsConfig:
    """Each data-parallel rank listens on ports of its own, the configured ones plus its rank, as vLLM's do."""
    replay = config.replay_endpoint
    return dataclasses.replace(
        config,
        endpoint=_endpoint_at_rank(config.endpoint, data_parallel_rank),
        replay_endpoint=None if replay is None else _endpoint_at_rank(replay, data_parallel_rank),
    )


def _endpoint_at_rank(endpoint: str, rank: int) -> str:
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def bound_socket(context: Context, kind: int, endpoint: str, key: str, hwm: int) -> zmq.Socket[bytes]:
    """Raises ConfigurationError that names the `key` of --kv-events-config. `hwm`: messages that wait for one peer."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_INBOUND_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, DEAD_PEER_MILLISECONDS // 1000)
    socket.setsockopt(zmq.TCP_MAXRT, DEAD_PEER_MILLISECONDS)
    try:
        _bind(socket, endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigurationError(
            f"--kv-events-config: cannot listen on {key} {endpoint}: {zmq.strerror(error.errno or 0)}; stop what uses "
            "it or choose another"
        ) from error
    return socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """`*` is every address, IPv6 and IPv4; of IPv4 alone where the kernel has no IPv6, or none switched on."""
    socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        socket.setsockopt(zmq.IPV6, 0)
        socket.bind(endpoint)
