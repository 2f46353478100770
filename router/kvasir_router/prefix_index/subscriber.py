"""Follows one engine over ZMQ: its messages as they are published, and those that were missed from its replay socket.

What they mean is decided elsewhere (`EventOrder`, `decode_events`, the listener); here are the sockets. Nothing waits:
an engine that does not listen costs an attempt to connect now and then. Whatever comes is data from the network: what
makes no sense is counted and skipped.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvasir_router.prefix_index.event_order import Action, Apply, EventOrder, Lost, Replay, Reset
from kvasir_router.prefix_index.kv_events import EventBatch, MalformedEventsError, decode_events
from kvasir_router.prefix_index.socket_reader import SocketReader

LOAD_TOPIC = b"kvasir-load"
_SEQUENCE_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_MAX_QUEUED_MESSAGES = 20_000  # beyond, ZMQ drops, which the sequence shows
_MAX_MESSAGE_BYTES = 16 * 2**20
_RECONNECT_MILLISECONDS, _MAX_RECONNECT_MILLISECONDS = 100, 5000
_HEARTBEAT_MILLISECONDS, _DEAD_PEER_MILLISECONDS = 5000, 15_000  # a vanished node closes no connection
_CONNECTED, _DISCONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(slots=True)
class EventStatistics:
    num_events: Counter[str] = field(default_factory=Counter)  # by type
    num_skipped: int = 0  # events that are unknown, or about another tier than the device's memory
    num_malformed: int = 0  # messages that cannot be read
    num_load_reports: int = 0
    num_gaps: int = 0
    num_replays: int = 0  # asked for; to see whether something is missing as well
    num_failed_replays: int = 0
    num_losses: int = 0  # gaps that no replay has filled
    lag_seconds: float | None = None  # of the last batch behind its time stamp, as far as the two clocks agree

    def add(self, other: "EventStatistics") -> None:
        """Everything but the lag, which is one engine's."""
        for each in fields(self):
            if each.name != "lag_seconds":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class EventAddress:
    """Where an engine publishes and replays, as ZMQ writes it."""

    events: str
    replay: str

    @classmethod
    def beside(cls, url: str, event_port: int, replay_port: int) -> "EventAddress":
        """On the host of the engine's own `url`, http://host:port."""
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        return cls(f"tcp://{host}:{event_port}", f"tcp://{host}:{replay_port}")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds."""

    verify_interval: float = 10.0
    """Between two looks for something missed that no later message has shown."""
    replay_timeout: float = 5.0
    """Without a message of a replay that was asked for."""


DEFAULT_TIMING = Timing()


class EventListener(Protocol):
    """Is told, in order, what one engine says. Its cache is unknown before the first `reset`."""

    def reset(self, *, is_complete: bool) -> None: ...

    def lost(self) -> None: ...

    def apply(self, batch: EventBatch) -> None: ...

    def report(self, payload: bytes) -> str | None:
        """A load report, decoded by the listener. Returns the engine's instance; None: it cannot be read."""
        ...


class Subscriber:
    """Runs from `start` to `close`, on one event loop. `wall_clock` is what engines stamp their batches with."""

    def __init__(
        self,
        context: Context,
        address: EventAddress,
        listener: EventListener,
        wall_clock: Callable[[], float],
        timing: Timing,
    ) -> None:
        self._context = context
        self._address = address
        self._listener = listener
        self._wall_clock = wall_clock
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._order = EventOrder()
        self._rank: int | None = None  # where several data-parallel engines publish at one address, the first counts
        self._instance: str | None = None
        self._readers: list[SocketReader] = []
        self._replay: SocketReader | None = None
        self._replay_deadline = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._statistics = EventStatistics()

    @property
    def statistics(self) -> EventStatistics:
        """Live: it goes on counting."""
        self._statistics.num_gaps = self._order.num_gaps
        self._statistics.num_replays = self._order.num_replays
        return self._statistics

    @property
    def is_replaying(self) -> bool:
        """What has come live waits meanwhile."""
        return self._replay is not None

    def start(self) -> None:
        socket = self._socket(zmq.SUB)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(_CONNECTED | _DISCONNECTED)
        self._readers = [SocketReader(socket, self._on_message), SocketReader(monitor, self._on_connection)]
        socket.connect(self._address.events)
        self.resync()
        self._verify_later()

    def resync(self) -> None:
        """Learn the engine's cache anew: at the start, and when it was found void otherwise."""
        self._perform(self._order.resync())

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for reader in self._readers:
            reader.close()
        self._end_replay()

    def _on_message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
            self._statistics.num_malformed += 1
        elif frames[0] == LOAD_TOPIC:
            self._on_load(frames[2])
        else:
            self._perform(self._order.receive(int.from_bytes(frames[1], "big"), frames[2]))

    def _on_load(self, payload: bytes) -> None:
        instance = self._listener.report(payload)
        if instance is None:
            self._statistics.num_malformed += 1
            return
        self._statistics.num_load_reports += 1
        if self._instance not in (None, instance):
            self.resync()
        self._instance = instance

    def _on_connection(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == _CONNECTED:
            self._perform(self._order.verify())
        else:
            self._order.disconnected()

    def _on_replayed(self, frames: list[bytes]) -> None:
        number, payload = frames[-2:] if len(frames) > 1 else (b"", b"")
        self._replay_deadline = self._loop.time() + self._timing.replay_timeout
        if number == _END_OF_REPLAY:
            self._end_replay()
            self._perform(self._order.replay_ended())
        elif len(number) == _SEQUENCE_BYTES:
            self._perform(self._order.replayed(int.from_bytes(number, "big"), payload))
        else:
            self._statistics.num_malformed += 1

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(payload):
                    self._apply(payload)
                case Reset(is_complete):
                    self._instance = None  # what follows may be another process
                    self._listener.reset(is_complete=is_complete)
                case Lost():
                    self._statistics.num_losses += 1
                    self._listener.lost()
                case Replay(start):
                    self._ask(start)

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode_events(payload)
        except MalformedEventsError:
            self._statistics.num_malformed += 1
            return
        if self._rank is None:
            self._rank = batch.rank
        if batch.rank != self._rank:
            self._statistics.num_skipped += len(batch.events) + batch.num_skipped
            return
        self._statistics.num_skipped += batch.num_skipped
        self._statistics.num_events.update(type(event).__name__ for event in batch.events)
        if self._replay is None:
            self._statistics.lag_seconds = self._wall_clock() - batch.sent
        self._listener.apply(batch)

    def _ask(self, start: int) -> None:
        self._end_replay()
        socket = self._socket(zmq.DEALER)
        socket.connect(self._address.replay)
        socket.send_multipart((b"", start.to_bytes(_SEQUENCE_BYTES, "big")), zmq.NOBLOCK)
        self._replay = SocketReader(socket, self._on_replayed)
        self._replay_deadline = self._loop.time() + self._timing.replay_timeout
        self._give_up_later()

    def _give_up_later(self) -> None:
        self._timers["replay"] = self._loop.call_at(self._replay_deadline, self._give_up_if_silent)

    def _give_up_if_silent(self) -> None:
        if self._loop.time() < self._replay_deadline:
            self._give_up_later()
            return
        self._statistics.num_failed_replays += 1
        self._end_replay()
        self._perform(self._order.replay_failed())

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._timers.pop("replay").cancel()
            self._replay.close()
            self._replay = None

    def _verify_later(self) -> None:
        self._timers["verify"] = self._loop.call_later(self._timing.verify_interval, self._verify)

    def _verify(self) -> None:
        self._perform(self._order.verify())
        self._verify_later()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.RCVHWM, _MAX_QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MILLISECONDS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MILLISECONDS),
            (zmq.HEARTBEAT_TIMEOUT, _DEAD_PEER_MILLISECONDS),
        ):
            socket.setsockopt(option, value)
        return socket
