"""The sockets between a service's routers: what this one tells them, and what it hears of them.

Each publishes at one port and listens to all that a DNS name stands for, itself among them, over ZMQ. What happens
within GATHER_SECONDS goes in one message; a message a second goes in any case, and who is silent for longer is
forgotten, as is what came before a message that was lost. Nothing waits for a peer.

Imports ZMQ, 90 ms and 3 MB: only a router that was told --peers does.
"""

import asyncio
import logging
import secrets
from collections.abc import Set
from dataclasses import dataclass
from weakref import WeakValueDictionary

import zmq

from kvasir_router.config import HostPort
from kvasir_router.errors import StartupError
from kvasir_router.prefix_index.socket_reader import SocketReader
from kvasir_router.service.peer_news import NAME_BYTES, MalformedNewsError, News, Seal
from kvasir_router.service.peer_settings import PEER_SETTINGS, PeerSettings, zmq_address
from kvasir_router.service.peers import GATHER_SECONDS, Peers

logger = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 10_000  # beyond, ZMQ drops, which the numbers show
_MAX_SUBSCRIPTION_BYTES = 1024  # whoever reaches the port may send these, without the secret
_MAX_MESSAGE_BYTES = 2**20
MAX_EVENTS = 500
"""Of a message: below 1 kB each."""


@dataclass(slots=True)
class _Peer:
    number: int  # of its last frame
    heard_at: float


class PeerFeed:
    """Of all services of this router, from its making to `close`, on one event loop. `host` is this router's own.

    Raises StartupError where the port is taken.
    """

    def __init__(self, host: str, peers: HostPort, secret: str | None, settings: PeerSettings = PEER_SETTINGS) -> None:
        self._settings = settings
        self._name = secrets.token_bytes(NAME_BYTES)  # of this process: another starts anew
        self._where = peers
        self._seal = Seal(secret)
        self._services: WeakValueDictionary[str, Peers] = WeakValueDictionary()  # one that is gone leaves no trace
        self._changed: set[str] = set()
        self._num_events = 0  # to be told
        self._num_frames = 0
        self._peers: dict[bytes, _Peer] = {}
        self._unheard: set[bytes] = set()  # names that were warned of
        self._addresses: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._gathering: asyncio.TimerHandle | None = None
        self.num_malformed = 0
        self.num_lost = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out = self._socket(zmq.PUB, _MAX_SUBSCRIPTION_BYTES)
        address = zmq_address("*" if host == "::" else host, peers.port)  # where there is no IPv6, ZMQ takes IPv4 for *
        try:
            self._out.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StartupError(f"cannot publish to peers on {address} (--peers): {error}") from error
        inbox = self._socket(zmq.SUB, _MAX_MESSAGE_BYTES)
        inbox.subscribe(b"")
        self._in = inbox
        self._reader = SocketReader(inbox, self._on_message)

    @property
    def num_peers(self) -> int:
        """That were heard lately."""
        return len(self._peers)

    def attach(self, name: str, service: Peers) -> None:
        self._services[name] = service
        service.on_event = lambda: self._soon(name)

    def follow(self, addresses: Set[str]) -> None:
        """tcp://host:port of all routers."""
        for address in self._addresses - addresses:
            self._addresses.remove(address)
            self._in.disconnect(address)
        for address in addresses - self._addresses:
            self._in.connect(address)
            self._addresses.add(address)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resolve(), name="peers' addresses")
            group.create_task(self._beat(), name="peers' heartbeat")

    def close(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        for service in self._services.values():
            service.on_event = _nobody_hears
        self._reader.close()
        self._context.destroy(linger=0)

    async def _resolve(self) -> None:
        was_found = True
        while True:
            try:
                self.follow(await self._settings.resolve(self._where))
                was_found = True
            except (OSError, zmq.ZMQError) as error:
                if was_found:
                    logger.warning("peers at %s are not found: %s", self._where.host, error)
                was_found = False
            await asyncio.sleep(self._settings.resolve_seconds)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_seconds)
            self._changed.update(self._services)
            self._send()
            self.expire()

    def expire(self) -> None:
        """Forgets who is silent."""
        oldest = self._loop.time() - self._settings.lifetime_seconds
        for name in [name for name, peer in self._peers.items() if peer.heard_at < oldest]:
            del self._peers[name]
            self._forget(name)

    def _soon(self, service: str) -> None:
        self._changed.add(service)
        self._num_events += 1
        if self._num_events == MAX_EVENTS:
            self._send()
        elif self._gathering is None:
            self._gathering = self._loop.call_later(GATHER_SECONDS, self._send)

    def _send(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        changed = {name: self._services.get(name) for name in self._changed}
        self._changed.clear()
        self._num_events = 0
        news = {name: told for name, each in changed.items() if each is not None and (told := each.take()) is not None}
        self._num_frames += 1
        self._out.send_multipart(self._seal.write(self._name, self._num_frames, news), zmq.NOBLOCK)

    def _on_message(self, message: list[bytes]) -> None:
        if message[0] == self._name:
            return
        try:
            number, services = self._seal.read(message)
        except MalformedNewsError as error:
            self.num_malformed += 1
            self._warn(message[0][:NAME_BYTES], error)
            return
        self._hear(message[0], number, services)

    def _warn(self, name: bytes, error: MalformedNewsError) -> None:
        """Once of each."""
        if name not in self._unheard and len(self._unheard) < self._settings.max_warnings:
            self._unheard.add(name)
            logger.warning("a peer (--peers) is not heard: %s", error)

    def _hear(self, name: bytes, number: int, services: dict[str, News]) -> None:
        peer = self._peers.setdefault(name, _Peer(number - 1, 0.0))
        if number <= peer.number:  # a pod of two addresses is heard twice
            return
        if number > peer.number + 1:
            self.num_lost += number - peer.number - 1
            self._forget(name)
        peer.number, peer.heard_at = number, self._loop.time()
        for service, news in services.items():
            if (heard := self._services.get(service)) is not None:
                heard.hear(name, news)

    def _forget(self, name: bytes) -> None:
        for service in self._services.values():
            service.forget(name)

    def _socket(self, kind: int, max_received_bytes: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _MAX_QUEUED_MESSAGES),
            (zmq.RCVHWM, _MAX_QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, max_received_bytes),
            (zmq.HEARTBEAT_IVL, round(1000 * self._settings.ping_seconds)),
            (zmq.HEARTBEAT_TIMEOUT, round(1000 * self._settings.dead_seconds)),
        ):
            made.setsockopt(option, value)
        return made


def _nobody_hears() -> None:
    """The feed is closed."""
