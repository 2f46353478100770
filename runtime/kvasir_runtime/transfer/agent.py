"""The engine's transfer agent: one thread that talks to other engines and moves blocks, while the core steps.

It joins what is offered (offers.py) and what is pulled (pulls.py) to the side channel and the connector, and brings
them the time. The core posts commands and takes events; it is woken when there are some. The agent never touches the
scheduler, and the core never waits for the agent.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.transfer.commands import (
    BeginOffer,
    BeginPull,
    CancelPull,
    Failure,
    FromAgent,
    OfferBlocks,
    Place,
    ReadInto,
    ToAgent,
    WithdrawOffer,
)
from kvasir_runtime.transfer.connector import Connector, Page
from kvasir_runtime.transfer.messages import FromPuller, GetMeta, Identity, KeptBy, Meta
from kvasir_runtime.transfer.metrics import TransferCounts, TransferStats
from kvasir_runtime.transfer.offers import Offers
from kvasir_runtime.transfer.pulls import Endpoint, Pulls, Read
from kvasir_runtime.transfer.side_channel import SideChannel

logger = logging.getLogger(__name__)

READ_POLL_SECONDS = 0.001
"""How often the connector is looked after while something is read, by us or from us: it has nothing to wait for."""
TICK_SECONDS = 0.25
"""Leases and heartbeats are looked at no more often."""
CLOSE_SECONDS = 5.0
"""How long a stop waits for the thread: a transfer library may hang in the middle of a call."""


@dataclass(frozen=True, slots=True)
class RunningRead:
    """A read that the connector is busy with."""

    read: Read
    number: int
    began: float


class TransferAgent:
    """`start` it, and `close` it from the same thread."""

    def __init__(
        self,
        connector: Connector,
        side_channel: SideChannel,
        identity: Identity,
        place: Place,
        *,
        page_bytes: int,
        lease_seconds: float,
        timeout_seconds: float,
        checksums: bool,
        wake_core: Callable[[], None],
        front: Endpoint | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`page_bytes`: of a page on all ranks. `wake_core` is called on the agent's thread. `front`: of the
        data-parallel rank that is asked by those who know the engine only; None: it is this one.
        """
        self._connector = connector
        self._channel = side_channel
        self.place = place
        self._front = front
        self._meta = Meta(identity, place.engine_id, connector.regions())
        self._checksums = checksums
        self._wake_core = wake_core
        self._clock = clock
        self.page_bytes = page_bytes
        self._counts = TransferCounts(page_bytes)
        self._offers = Offers(
            lease_seconds, partial(connector.checksums, side="written") if checksums else None, self._counts
        )
        self._pulls = Pulls(identity, place.tensor_size, timeout_seconds, self._counts)
        self._reads: dict[str, RunningRead] = {}
        self._departed: list[str] = []
        """Engines that the connector may forget once nothing is read from them."""
        self._next_tick = 0.0
        self._commands: deque[ToAgent] = deque()
        self._events: deque[FromAgent] = deque()
        self._is_core_woken = False
        self._has_to_stop = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, *commands: ToAgent) -> None:
        """From the core's thread."""
        self._commands.extend(commands)
        self._channel.wake()

    def take(self) -> list[FromAgent]:
        """All events since the last call; on the core's thread."""
        self._is_core_woken = False  # first, so that what comes from here on wakes again
        events: list[FromAgent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    @property
    def bytes_per_second(self) -> float | None:
        """At which blocks come; None before any has."""
        return self._counts.bytes_per_second

    def stats(self, num_leased_blocks: int) -> TransferStats:
        return self._counts.stats(num_leased_blocks)

    def close(self, wait_seconds: float = CLOSE_SECONDS) -> None:
        """End the thread, if that is not done; the side channel is closed by who opened it.

        A thread that hangs is left behind with the connector, which it may still write by: both end with the process.
        """
        if self._has_to_stop:
            return
        self._has_to_stop = True
        self._channel.wake()
        self._thread.join(wait_seconds)
        if self._thread.is_alive():
            logger.error("the KV transfer thread has not ended in %g s: a read hangs; it is left behind", wait_seconds)
        else:
            self._connector.close()

    def _run(self) -> None:
        while not self._has_to_stop:
            self._channel.poll(self._wait_seconds())
            try:
                self.turn()
            except Exception:
                logger.exception("a turn of the KV transfer failed")

    def turn(self) -> None:
        """Everything that has come, and what follows from it."""
        now = self._clock()
        self._take_commands(now)
        self._take_messages(now)
        if self._offers.are_read:
            self._connector.progress()
        self._look_after_reads(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._offers.tick(now)
            self._pulls.tick(now)
        self._act(now)
        self._tell_core()

    def _wait_seconds(self) -> float | None:
        if self._reads or self._offers.are_read:
            return READ_POLL_SECONDS
        deadlines = (self._offers.next_deadline(), self._pulls.next_deadline())
        soonest = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if soonest is None else max(soonest, self._next_tick) - self._clock()

    def _take_commands(self, now: float) -> None:
        while self._commands:
            match command := self._commands.popleft():
                case BeginOffer():
                    self._offers.begin(command, now)
                    if command.is_announced and self._front is not None:
                        self._ask(self._front, KeptBy(command.key, self.place.port), now)
                case OfferBlocks():
                    self._offers.add(command, now)
                case WithdrawOffer():
                    self._offers.withdraw(command)
                case BeginPull():
                    self._pulls.begin(command, now)
                case ReadInto():
                    self._pulls.read_into(command, now)
                case CancelPull():
                    self._pulls.cancel(command)

    def _take_messages(self, now: float) -> None:
        for puller, question in self._channel.asked():
            self._answer(puller, question, now)
        for endpoint, answer in self._channel.answered():
            try:
                self._pulls.receive(endpoint, answer, now)
            except Exception:  # it does not keep to the protocol; others must not wait for what a turn would lose
                logger.exception("the KV transfer's peer %s:%d said what makes no sense", *endpoint)
                self._pulls.lose_peer(endpoint, now)
        for endpoint in self._channel.lost():
            self._pulls.lose_peer(endpoint, now)
            self._channel.hang_up(endpoint)

    def _answer(self, puller: bytes, question: FromPuller, now: float) -> None:
        match question:
            case GetMeta():
                self._channel.answer(puller, self._meta)
            case KeptBy():
                self._offers.refer(question, now)
            case _:
                self._offers.receive(puller, question, now)

    def _look_after_reads(self, now: float) -> None:
        for request_id, running in list(self._reads.items()):
            state = self._connector.state(running.number)
            if state == "reading":
                continue
            del self._reads[request_id]
            if state == "done":
                self._counts.read(len(running.read.pairs), now - running.began)
            self._pulls.read_ended(running.read, self._failure_of(running.read, state), now)

    def _failure_of(self, read: Read, state: str) -> Failure | None:
        if state == "failed":
            return Failure("read", "they could not be read")
        try:
            return self._check(read)
        except Exception as error:  # the device has no memory for it, say: the pull must end all the same
            logger.exception("blocks that were read cannot be checked")
            return Failure("checksum", f"they cannot be checked: {error}")

    def _check(self, read: Read) -> Failure | None:
        """Whether what was read is what was written."""
        if read.checksums is None or not self._checksums:
            return None
        ours = [Page(pair.ours, pair.group) for pair in read.pairs]
        found = self._connector.checksums(ours, read.num_ranks, "read")
        for pair, expected, seen in zip(read.pairs, read.checksums, found, strict=True):
            if seen != expected:
                return Failure(
                    "checksum", f"block {pair.theirs} was written with checksum {expected:016x}, and {seen:016x} came"
                )
        return None

    def _act(self, now: float) -> None:
        """What the state machines ask for, until they ask for nothing more."""
        pulls = self._pulls
        while pulls.new_peers or pulls.reads or pulls.cancelled_reads or pulls.lost_peers:
            self._meet_new_peers(now)
            for request_id in _taken(pulls.cancelled_reads):
                if request_id in self._reads:
                    self._connector.cancel(self._reads[request_id].number)
            for read in _taken(pulls.reads):
                self._start(read, now)
            self._part_from_lost_peers(now)
        for endpoint, question in _taken(pulls.outbox):
            self._ask(endpoint, question, now)
        for puller, answer in _taken(self._offers.outbox):
            self._channel.answer(puller, answer)
        for port, done in _taken(self._offers.passed_on):
            self._ask((self.place.host, port), done, now)

    def _ask(self, endpoint: Endpoint, question: FromPuller, now: float) -> None:
        try:
            self._channel.ask(endpoint, question)
        except KvTransferError:
            self._pulls.lose_peer(endpoint, now)

    def _meet_new_peers(self, now: float) -> None:
        for endpoint, meta in _taken(self._pulls.new_peers):
            try:
                if meta.engine_id == self.place.engine_id:
                    raise KvTransferError("that is this engine itself")
                self._departed = [engine_id for engine_id in self._departed if engine_id != meta.engine_id]
                self._connector.add_peer(meta.engine_id, meta.regions)
            except KvTransferError as error:
                self._pulls.refuse_peer(endpoint, str(error), now)

    def _start(self, read: Read, now: float) -> None:
        try:
            self._reads[read.request_id] = RunningRead(
                read, self._connector.start_read(read.engine_id, read.pairs), now
            )
        except KvTransferError as error:
            self._pulls.read_ended(read, Failure("read", str(error)), now)

    def _part_from_lost_peers(self, now: float) -> None:
        for endpoint, engine_id in _taken(self._pulls.lost_peers):
            for question in [ask for to, ask in self._pulls.outbox if to == endpoint]:
                self._ask(endpoint, question, now)
            self._pulls.outbox = [(to, ask) for to, ask in self._pulls.outbox if to != endpoint]
            self._channel.hang_up(endpoint)
            if engine_id is not None:
                self._departed.append(engine_id)
        busy = {running.read.engine_id for running in self._reads.values()}
        for engine_id in [engine for engine in self._departed if engine not in busy]:
            self._departed.remove(engine_id)
            self._connector.remove_peer(engine_id)

    def _tell_core(self) -> None:
        for events in (self._pulls.events, self._offers.events):
            self._events.extend(_taken(events))
        if self._events and not self._is_core_woken:
            self._is_core_woken = True
            self._wake_core()


def _taken(items: list) -> list:  # type: ignore[type-arg]
    """The items, of a list that is empty afterwards."""
    taken = items[:]
    items.clear()
    return taken
