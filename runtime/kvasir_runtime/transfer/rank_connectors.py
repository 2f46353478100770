"""The connector of an engine of several ranks: what is asked of it goes to all of them, each of which reads its part of
every page, its layers' and its heads', into its own buffer (rank_transfers.py)."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.transfer.connector import CHECKSUM_MODULUS, Page, PagePair, ReadState, Side
from kvasir_runtime.transfer.messages import Region
from kvasir_runtime.transfer.rank_messages import (
    AddPeer,
    Answer,
    CancelRead,
    Checksums,
    FromConnector,
    GetChecksums,
    OwnRegion,
    PeerAdded,
    Progress,
    ReadEnded,
    RemovePeer,
    Socket,
    StartRead,
    ToConnector,
)

Kind = TypeVar("Kind", bound=Answer)


@dataclass(slots=True)
class SharedRead:
    num_reading: int
    """Ranks that are at it."""
    has_failed: bool = False


class RankConnectors:
    """Checksums and handshakes are waited for; reads are not."""

    def __init__(self, sockets: Sequence[Socket]) -> None:
        """One to each rank; they are closed by who opened them. Waits for the ranks. Raises KvTransferError."""
        self.answer_seconds = 30.0
        """A rank's transfer thread waits for no step, and a rank that dies ends the engine: this is long."""
        self._sockets = sockets
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromConnector] = msgspec.msgpack.Decoder(FromConnector)
        self._answers: dict[int, dict[int, Answer]] = {}
        """By number and rank."""
        self._reads: dict[int, SharedRead] = {}
        self._last_number = 0
        self._regions: dict[int, Region] = {}
        """By rank."""
        self._wait_for(self._regions)

    def regions(self) -> list[Region]:
        return [self._regions[rank] for rank in range(len(self._sockets))]

    def add_peer(self, engine_id: str, regions: Sequence[Region]) -> None:
        answers = self._ask(AddPeer(self._number(), engine_id, [*regions]), PeerAdded)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            self.remove_peer(engine_id)
            raise KvTransferError(errors[0])

    def remove_peer(self, engine_id: str) -> None:
        self._send(RemovePeer(engine_id))

    def start_read(self, engine_id: str, pairs: Sequence[PagePair]) -> int:
        number = self._number()
        self._reads[number] = SharedRead(len(self._sockets))
        self._send(StartRead(number, engine_id, [*pairs]))
        return number

    def state(self, read: int) -> ReadState:
        self._receive()
        if self._reads[read].num_reading:
            return "reading"
        return "failed" if self._reads.pop(read).has_failed else "done"

    def cancel(self, read: int) -> None:
        self._send(CancelRead(read))

    def progress(self) -> None:
        self._send(Progress())

    def checksums(self, pages: Sequence[Page], num_ranks: int, side: Side) -> list[int]:
        """Those of the parts add up. Raises KvTransferError."""
        answers = self._ask(GetChecksums(self._number(), [*pages], num_ranks, side), Checksums)
        of_ranks = [answer.of_pages for answer in answers if answer.of_pages is not None]
        if len(of_ranks) < len(answers):
            raise KvTransferError("a rank could not compute the checksums of its pages; its log says why")
        return [sum(sums) % CHECKSUM_MODULUS for sums in zip(*of_ranks, strict=True)]

    def close(self) -> None:
        """Ranks end on their own."""

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _send(self, message: ToConnector) -> None:
        """To one that has gone nothing is sent: the engine is about to end."""
        payload = self._encoder.encode(message)
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send(payload, zmq.NOBLOCK)

    def _ask(self, question: AddPeer | GetChecksums, kind: type[Kind]) -> list[Kind]:
        """All ranks' answers."""
        answers = self._answers[question.number] = {}
        self._send(question)
        try:
            self._wait_for(answers)
        finally:
            del self._answers[question.number]
        return [answer for answer in answers.values() if isinstance(answer, kind)]

    def _wait_for(self, words: Mapping[int, object]) -> None:
        """Until there is one of each rank."""
        poller, deadline = zmq.Poller(), time.monotonic() + self.answer_seconds
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        while len(words) < len(self._sockets):
            if time.monotonic() > deadline:
                silent = [rank for rank in range(len(self._sockets)) if rank not in words]
                raise KvTransferError(
                    f"the transfer threads of ranks {silent} have not answered in {self.answer_seconds:g} s"
                )
            poller.poll(1000)
            self._receive()

    def _receive(self) -> None:
        for rank, socket in enumerate(self._sockets):
            while (message := self._next(socket)) is not None:
                self._take(rank, message)

    def _take(self, rank: int, message: FromConnector) -> None:
        match message:
            case OwnRegion():
                self._regions[rank] = message.region
            case ReadEnded():
                read = self._reads[message.number]
                read.num_reading -= 1
                read.has_failed |= message.has_failed
            case _ if message.number in self._answers:  # else it came too late
                self._answers[message.number][rank] = message

    def _next(self, socket: Socket) -> FromConnector | None:
        try:
            return self._decoder.decode(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
