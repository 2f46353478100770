"""Routers that hear one another over real sockets, and strangers that speak and listen there."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from socket import create_connection, create_server

import pytest
import zmq
from tests.loopback import own_host
from tests.router.prefix_index.zmq_sockets import Sockets, zmq_sockets
from tests.router.service.test_peers import Router

from kvasir_router.admission.queued_request import Waiting
from kvasir_router.config import HostPort
from kvasir_router.errors import StartupError
from kvasir_router.service.ledger import Ticket
from kvasir_router.service.peer_feed import MAX_EVENTS, PeerFeed
from kvasir_router.service.peer_news import Dispatched, News, Seal
from kvasir_router.service.peer_settings import PEER_SETTINGS, PeerSettings, addresses_of

pytestmark = pytest.mark.anyio
HOSTS = (own_host(1), own_host(2))
SPEAKERS_HOST = own_host(3)
SPEAKER = b"a peer's name: s"


def free_place() -> HostPort:
    with create_server((HOSTS[0], 0)) as free:
        return HostPort("routers", free.getsockname()[1])


@pytest.fixture
def where() -> HostPort:
    return free_place()


class Member:
    """A router with its feed."""

    def __init__(self, host: str, where: HostPort, secret: str | None, settings: PeerSettings) -> None:
        self.router = Router()
        self.feed = PeerFeed(host, where, secret, settings)
        self.feed.attach("s", self.router.peers)
        self.feed.follow({f"tcp://{each}:{where.port}" for each in (*HOSTS, SPEAKERS_HOST)})

    @property
    def num_tokens(self) -> int:
        return self.router.endpoint().load.prefill_tokens


@pytest.fixture
async def join(where: HostPort) -> AsyncIterator[Callable[..., Member]]:
    async with AsyncExitStack() as stack:

        def start(
            host: str,
            secret: str | None = "secret",
            at: HostPort = where,
            settings: PeerSettings = PEER_SETTINGS,
            *,
            runs: bool = False,
        ) -> Member:
            member = Member(host, at, secret, settings)
            stack.callback(member.feed.close)
            if runs:
                running = asyncio.create_task(member.feed.run())
                stack.callback(running.cancel)
            return member

        yield start


async def until(condition: Callable[[], object], again: Callable[[], object] = lambda: None) -> None:
    async with asyncio.timeout(10):
        while not condition():
            again()
            await asyncio.sleep(0.01)


async def heard(one: Member, other: Member) -> Ticket:
    """A ticket of one that the other has heard of, once they are connected."""
    tickets: list[Ticket] = []

    def again() -> None:
        for ticket in tickets:
            ticket.finish()
        tickets[:] = [one.router.dispatch(num_tokens=100)]

    await until(lambda: other.num_tokens == 100, again)
    return tickets[0]


class Speaker:
    """A peer that says what the test has it say."""

    def __init__(self, sockets: Sockets, where: HostPort) -> None:
        self.num_sent = 0
        self._out = sockets.open(zmq.PUB)
        self.disconnections = sockets.monitor(self._out)
        self._out.bind(f"tcp://{SPEAKERS_HOST}:{where.port}")

    def say(self, *frames: bytes) -> None:
        self._out.send_multipart(frames)

    def send(self, num_tokens: int, number: int | None = None) -> None:
        """One more request, in the next frame or that of the number."""
        self.num_sent += 1
        event = Dispatched(self.num_sent, Router().endpoint().url, f"r{self.num_sent}", 0, num_tokens, 1, 0)
        self.say(*Seal("secret").write(SPEAKER, number or self.num_sent, {"s": News([event])}))

    async def heard_by(self, member: Member) -> None:
        """Of 100 tokens, in frame 1."""

        def again() -> None:
            self.num_sent = 0
            self.send(100)

        await until(lambda: member.num_tokens == 100, again)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with zmq_sockets() as sockets:
        yield sockets


@pytest.fixture
def speaker(sockets: Sockets, where: HostPort) -> Speaker:
    return Speaker(sockets, where)


class Listener:
    """Whoever reaches a router's port: how many messages it hears there, and how many events they have."""

    def __init__(self, sockets: Sockets, where: HostPort, topic: bytes = b"") -> None:
        self._in = sockets.open(zmq.SUB)
        self.disconnections = sockets.monitor(self._in)
        self._in.subscribe(topic)
        self._in.connect(f"tcp://{HOSTS[0]}:{where.port}")

    def messages(self) -> list[int]:
        """Events in each that has come since it was last asked."""
        found = []
        while self._in.poll(0):
            _, services = Seal("secret").read(self._in.recv_multipart())
            found.append(sum(len(news.events) for news in services.values()))
        return found


async def test_each_hears_the_others_and_not_itself(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    (await heard(one, other)).finish()
    await until(lambda: other.num_tokens == 0)
    ticket = await heard(other, one)
    assert other.num_tokens == 100  # its own, once
    ticket.finish()
    await until(lambda: one.num_tokens == 0)
    assert (one.feed.num_peers, other.feed.num_peers) == (1, 1)


@pytest.mark.parametrize(
    ("num_requests", "messages"),
    [(5, [5]), (MAX_EVENTS - 1, [MAX_EVENTS - 1]), (MAX_EVENTS, [MAX_EVENTS]), (MAX_EVENTS + 1, [MAX_EVENTS, 1])],
)
async def test_what_happens_at_once_goes_in_one_message_of_so_many_events_at_most(
    num_requests: int,
    messages: list[int],
    join: Callable[..., Member],
    sockets: Sockets,
    where: HostPort,
) -> None:
    one, listener = join(HOSTS[0]), Listener(sockets, where)
    await until(listener.messages, lambda: one.router.dispatch("x").finish())
    await until(lambda: not listener.messages())
    for number in range(num_requests):
        one.router.dispatch(f"{number}", num_tokens=10)
    found: list[int] = []
    await until(lambda: found.extend(listener.messages()) or sum(found) == num_requests)
    assert found == messages


async def test_who_has_another_secret_is_not_heard(join: Callable[..., Member]) -> None:
    one, other = join(HOSTS[0]), join(HOSTS[1], "another")
    await until(lambda: other.feed.num_malformed, lambda: one.router.dispatch().finish())
    assert (other.num_tokens, other.feed.num_peers) == (0, 0)


async def test_who_is_not_believed_is_warned_of_once(
    join: Callable[..., Member], speaker: Speaker, caplog: pytest.LogCaptureFixture
) -> None:
    """By the beginning of its name, and of so many at most."""
    feed = join(HOSTS[0], settings=PeerSettings(max_warnings=3)).feed
    with caplog.at_level(logging.WARNING):
        await until(lambda: feed.num_malformed, lambda: speaker.say(b"1" * 16, b"", b""))
        for name, num_warnings in (
            (b"1" * 16, 1),
            (b"2" * 1000, 2),
            (b"2" * 16, 2),
            (b"3" * 16, 3),
            (b"4" * 16, 3),
        ):
            num_before = feed.num_malformed
            speaker.say(name, b"", b"")
            await until(lambda before=num_before: feed.num_malformed > before)  # type: ignore[misc]
            assert len(caplog.records) == num_warnings


async def test_the_largest_messages_are_read(join: Callable[..., Member]) -> None:
    """An id comes from a header, which may have 64 kB."""
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    for number in range(2500):
        one.router.dispatch(f"{number}" + "\xff" * 60_000, num_tokens=1)
    await until(lambda: other.num_tokens == 100 + 2500)
    assert other.feed.num_lost == 0


async def test_whoever_listens_subscribes_in_few_bytes(
    join: Callable[..., Member], sockets: Sockets, where: HostPort
) -> None:
    one = join(HOSTS[0])
    short, long = (Listener(sockets, where, topic) for topic in (b"x" * 1000, b"x" * 1100))
    await until(lambda: long.disconnections, lambda: one.router.dispatch("x").finish())
    assert not short.disconnections


async def test_whoever_speaks_is_heard_up_to_a_bound(join: Callable[..., Member], speaker: Speaker) -> None:
    feed = join(HOSTS[0]).feed
    await until(lambda: feed.num_malformed, lambda: speaker.say(SPEAKER, b"", b""))
    num_before = feed.num_malformed
    speaker.say(SPEAKER, b"x" * 2**20, b"")
    await until(lambda: feed.num_malformed > num_before)
    assert not speaker.disconnections
    speaker.say(SPEAKER, b"x" * (2**20 + 1), b"")
    await until(lambda: speaker.disconnections)


@pytest.mark.parametrize(("dead_seconds", "is_cut_off"), [(0.1, True), (60.0, False)])
async def test_who_answers_no_ping_for_long_is_cut_off(
    dead_seconds: float, is_cut_off: bool, join: Callable[..., Member], where: HostPort
) -> None:
    """A subscriber of ZMTP 3.0 that says nothing after its greeting, as a node that has vanished."""
    join(HOSTS[0], settings=PeerSettings(ping_seconds=0.05, dead_seconds=dead_seconds))
    with create_connection((HOSTS[0], where.port)) as vanished:
        vanished.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        vanished.sendall(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB")
        vanished.setblocking(False)
        loop, received, is_open = asyncio.get_running_loop(), b"", True
        async with asyncio.timeout(5):
            while is_open and received.count(b"PING") < 6:
                chunk = await loop.sock_recv(vanished, 1000)
                received, is_open = received + chunk, bool(chunk)
    assert b"READY" in received
    assert b"PING" in received
    assert is_open is not is_cut_off


async def test_what_came_before_a_lost_message_is_forgotten(join: Callable[..., Member], speaker: Speaker) -> None:
    other = join(HOSTS[0])
    await speaker.heard_by(other)
    speaker.send(30, number=4)
    await until(lambda: other.num_tokens == 30)
    assert other.feed.num_lost == 2


async def test_a_message_that_comes_twice_counts_once(join: Callable[..., Member], speaker: Speaker) -> None:
    other = join(HOSTS[0])
    await speaker.heard_by(other)
    speaker.send(30, number=1)
    speaker.send(7, number=2)
    await until(lambda: other.num_tokens == 107)


async def test_who_is_silent_is_forgotten(join: Callable[..., Member], speaker: Speaker) -> None:
    settings = PeerSettings(lifetime_seconds=0.05)
    patient, impatient = join(HOSTS[0]), join(HOSTS[1], settings=settings)
    await until(lambda: patient.feed.num_peers and impatient.feed.num_peers, lambda: speaker.send(1))
    await until(lambda: not impatient.feed.num_peers, impatient.feed.expire)
    patient.feed.expire()
    assert (impatient.num_tokens, patient.feed.num_peers) == (0, 1)
    assert patient.num_tokens > 0
    assert PEER_SETTINGS.lifetime_seconds > PEER_SETTINGS.heartbeat_seconds


async def test_a_heartbeat_says_who_waits_without_any_event(join: Callable[..., Member]) -> None:
    one, other = join(HOSTS[0], settings=settings_of({HOSTS[0]}), runs=True), join(HOSTS[1])
    one.router.waiting = Waiting(3.0, 300.0)
    await until(lambda: other.router.peers.num_before(float) == 1)


def settings_of(hosts: set[str]) -> PeerSettings:
    """Quick ones, of routers whose name stands for these hosts."""

    async def resolve(asked: HostPort) -> set[str]:
        return {f"tcp://{host}:{asked.port}" for host in hosts}

    return PeerSettings(heartbeat_seconds=0.02, resolve_seconds=0.01, resolve=resolve)


async def test_one_that_is_gone_is_followed_no_more(
    join: Callable[..., Member], where: HostPort, speaker: Speaker
) -> None:
    """What it says meanwhile is lost, as shows when it is there again."""
    other = join(HOSTS[0])
    await speaker.heard_by(other)
    other.feed.follow({f"tcp://{HOSTS[1]}:{where.port}"})
    speaker.send(30)
    other.feed.follow({f"tcp://{SPEAKERS_HOST}:{where.port}"})
    await until(lambda: other.feed.num_lost, lambda: speaker.send(1))


async def test_names_are_resolved_again_and_again(join: Callable[..., Member], where: HostPort) -> None:
    """Also where they were not found, or another way."""
    answers: list[set[str]] = [set(), {HOSTS[0]}, {HOSTS[0], HOSTS[1]}]

    async def resolve(asked: HostPort) -> set[str]:
        assert asked == where
        hosts = answers.pop(0) if len(answers) > 1 else answers[0]
        if not hosts:
            raise OSError("no such host")
        return {f"tcp://{host}:{asked.port}" for host in hosts}

    one = join(HOSTS[0], settings=PeerSettings(resolve_seconds=0.01, resolve=resolve), runs=True)
    await heard(join(HOSTS[1]), one)


async def test_a_name_stands_for_all_its_addresses() -> None:
    assert await addresses_of(HostPort("127.0.0.1", 5559)) == {"tcp://127.0.0.1:5559"}
    assert await addresses_of(HostPort("::1", 5559)) == {"tcp://[::1]:5559"}


async def test_a_port_that_is_taken_is_named(join: Callable[..., Member]) -> None:
    join(HOSTS[0])
    with pytest.raises(StartupError, match="--peers"):
        join(HOSTS[0])


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_on_all_addresses_it_is_heard_by_both_families(
    join: Callable[..., Member], where: HostPort, address: str
) -> None:
    one, other = join("::"), join(HOSTS[1], at=free_place())
    other.feed.follow({f"tcp://{address}:{where.port}"})
    await heard(one, other)
