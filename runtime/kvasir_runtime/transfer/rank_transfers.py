"""A rank's part in exchanging KV: a thread beside its steps that does what the engine's transfer agent asks of
the rank's own connector."""

import logging
import threading
from collections.abc import Callable

import msgspec
import zmq

from kvasir_runtime.errors import KvTransferError
from kvasir_runtime.service_secret import CurveKeys, identify
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.rank_messages import (
    AddPeer,
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

logger = logging.getLogger(__name__)

READ_POLL_MILLISECONDS = 1


class RankTransfers:
    """Lives as long as its process: `start` it, and it is never closed."""

    def __init__(
        self,
        connector: Connector,
        address: str,
        on_failure: Callable[[Exception], object],
        keys: CurveKeys | None = None,
    ) -> None:
        """`on_failure` is called on the thread, which has ended then. `keys`: the engine core's; None: it has none."""
        self._connector = connector
        self._socket: Socket = zmq.Context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        identify(self._socket, keys)
        self._socket.connect(address)
        self._on_failure = on_failure
        self._reads: dict[int, int] = {}
        """The agent's numbers of reads, and the connector's."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToConnector] = msgspec.msgpack.Decoder(ToConnector)

    def start(self) -> None:
        threading.Thread(target=self._run, name="kv-transfer", daemon=True).start()

    def _run(self) -> None:
        try:
            self._send(OwnRegion(self._connector.regions()[0]))
            while True:
                self._turn()
        except Exception as error:
            self._on_failure(error)
        finally:
            self._socket.context.destroy(linger=0)

    def _turn(self) -> None:
        """Everything that has come; sleeps until something does, unless there are reads to look after."""
        self._socket.poll(READ_POLL_MILLISECONDS if self._reads else None)
        while (message := self._next()) is not None:
            self._take(message)
        for number, read in list(self._reads.items()):
            state = self._connector.state(read)
            if state != "reading":
                del self._reads[number]
                self._send(ReadEnded(number, state == "failed"))

    def _take(self, message: ToConnector) -> None:
        match message:
            case AddPeer():
                self._send(PeerAdded(message.number, self._add_peer(message)))
            case RemovePeer():
                self._connector.remove_peer(message.engine_id)
            case StartRead():
                self._start(message)
            case CancelRead() if message.number in self._reads:
                self._connector.cancel(self._reads[message.number])
            case CancelRead():
                """It has ended."""
            case Progress():
                self._connector.progress()
            case GetChecksums():
                self._send(Checksums(message.number, self._checksums(message)))

    def _checksums(self, message: GetChecksums) -> list[int] | None:
        """None where they cannot be had: the device has no memory for it, say."""
        try:
            return self._connector.checksums(message.pages, message.num_ranks, message.side)
        except Exception:
            logger.exception("checksums of %d pages could not be computed", len(message.pages))
            return None

    def _add_peer(self, message: AddPeer) -> str | None:
        """What is wrong with it."""
        try:
            self._connector.add_peer(message.engine_id, message.regions)
        except KvTransferError as error:
            return str(error)
        return None

    def _start(self, message: StartRead) -> None:
        try:
            self._reads[message.number] = self._connector.start_read(message.engine_id, message.pairs)
        except KvTransferError as error:
            logger.warning("%s", error)
            self._send(ReadEnded(message.number, has_failed=True))

    def _send(self, message: FromConnector) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _next(self) -> ToConnector | None:
        try:
            return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
