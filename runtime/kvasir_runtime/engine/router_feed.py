"""What the engine core publishes for routers as it goes: what its prefix cache gained and lost, and its load.

The loop calls it once a turn, after clients have got their tokens. It never waits: nobody may be listening, or slowly.
"""

import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from kvasir_runtime.config import LOAD_TOPIC, KvEventsConfig
from kvasir_runtime.engine.load_report import LoadReport, LoadReporter
from kvasir_runtime.engine.replay_buffer import ReplayBuffer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.events import EventBatch, KvEvent, KvEventLog
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.stats import SchedulerStats

logger = logging.getLogger(__name__)

MAX_INBOUND_BYTES = 1024
"""Of a message to us: a subscription, or a replay's first sequence."""
DEAD_PEER_MILLISECONDS = 30_000
"""After which a listener that does not acknowledge what it is sent is gone, and its queue with it."""
REPLAY_HWM = 1000
"""Messages that wait for one reader of a replay."""
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
SLOW_READER_MILLISECONDS = 2000
"""For which one reader may keep others waiting before its replay is given up; it asks again."""

Context = zmq.Context[zmq.Socket[bytes]]


class RouterFeed:
    def __init__(
        self,
        event_log: KvEventLog,
        publisher: "EventPublisher",
        reporter: LoadReporter | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reporter` None: load is not reported."""
        self.event_log = event_log
        self._publisher = publisher
        self._reporter = reporter
        self._clock = clock
        self.num_kv_events = 0
        """Published so far."""

    def arrive(self, message: AddRequest) -> None:
        if self._reporter is not None and message.http_request_id is not None:
            self._reporter.arrive(message.http_request_id)

    def publish(self, stats: SchedulerStats) -> None:
        """All that a turn brought; of the load what is due."""
        if events := self.event_log.take():
            self._publisher.publish_events(events)
            self.num_kv_events += len(events)
        if self._reporter is not None and (report := self._reporter.due(stats, self._clock())) is not None:
            self._publisher.publish_load(report)

    def wait_seconds(self) -> float | None:
        """Until `publish` should be called again although nothing happens; None: not before something does."""
        return None if self._reporter is None else self._reporter.wait_seconds(self._clock())


class EventPublisher:
    """The sockets that routers listen to: KV events and load reports on one PUB, what was missed on a ROUTER. Used from
    the engine core's one thread.

    Messages are vLLM's: [topic, sequence, payload], the sequence as 8 bytes big-endian, the payload msgpack. Publishing
    never blocks: without a listener it costs a few microseconds, and what a slow one has not taken beyond `hwm`
    messages is dropped for it alone, which it sees by the sequence. Sequences of events and of load reports are counted
    apart.
    """

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


class ReplayServer:
    """Answers readers that missed KV events, from a thread of its own that sleeps until one asks.

    A request is [start], 8 bytes big-endian; the answer a message [sequence, payload] for each batch from there on,
    then [-1, nothing]. That is vLLM's replay; the empty frame that a REQ socket puts in front comes back in front.
    """

    def __init__(self, socket: zmq.Socket[bytes], buffer: ReplayBuffer) -> None:
        """Takes the bound ROUTER over, and closes it when its context is terminated."""
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or what a slow reader has no room for would be dropped unseen
        socket.setsockopt(zmq.SNDTIMEO, SLOW_READER_MILLISECONDS)
        self._socket = socket
        self._buffer = buffer
        self._thread = threading.Thread(target=self._serve, name="kv-event-replay", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                *envelope, start = self._socket.recv_multipart()
                self._answer(envelope, start)
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, envelope: list[bytes], start: bytes) -> None:
        if len(start) != SEQUENCE_BYTES:
            logger.warning("a replay of KV events was asked for with %d bytes; it takes 8, big-endian", len(start))
            return
        try:
            for sequence, payload in self._buffer.since(int.from_bytes(start, "big")):
                self._socket.send_multipart([*envelope, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload])
            self._socket.send_multipart([*envelope, END_OF_REPLAY, b""])
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError as error:  # it left, or does not read
            logger.info("a replay of KV events was given up: %s", error.strerror)
