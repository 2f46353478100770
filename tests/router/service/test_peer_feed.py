"""Routers that hear one another over real sockets."""

import asyncio
import logging
import select
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from socket import create_server

import pytest
import zmq
from tests.router.service.test_peers import Router

from kvasir_router.admission.queued_request import Waiting
from kvasir_router.config import HostPort
from kvasir_router.errors import StartupError
from kvasir_router.service import peer_feed
from kvasir_router.service.ledger import Ticket
from kvasir_router.service.peer_feed import LIFETIME_SECONDS, PeerFeed

pytestmark = pytest.mark.anyio
HOSTS = ("127.0.0.1", "127.0.0.2")


def free_place() -> HostPort:
    with create_server((HOSTS[0], 0)) as free:
        return HostPort("routers", free.getsockname()[1])


@pytest.fixture
def where() -> HostPort:
    return free_place()


class Member:
    """A router with its feed."""

    def __init__(self, host: str, where: HostPort, secret: str | None) -> None:
        self.router = Router()
        self.feed = PeerFeed(host, where, secret)
        self.feed.attach("s", self.router.peers)
        self.feed.follow({f"tcp://{each}:{where.port}" for each in HOSTS})

    @property
    def num_tokens(self) -> int:
        return self.router.endpoint().load.prefill_tokens


@pytest.fixture
async def join(where: HostPort) -> AsyncIterator[Callable[..., Member]]:
    async with AsyncExitStack() as stack:

        def start(host: str, secret: str | None = "secret", at: HostPort = where) -> Member:
            member = Member(host, at, secret)
            stack.callback(member.feed.close)
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


async def test_routers_that_hear_one_another_act_one_after_the_other(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    assert one.feed.has_turn(0.0), "it is alone yet"
    (await heard(one, other)).finish()
    await until(lambda: (one.feed.num_peers, other.feed.num_peers) == (1, 1), other.feed._send)
    turns = [(one.feed.has_turn(seconds), other.feed.has_turn(seconds)) for seconds in (0.0, 2.0, 4.0, 6.0)]
    assert sorted(turns[:2]) == [(False, True), (True, False)]
    assert turns[2:] == turns[:2]


async def test_each_hears_the_others_and_not_itself(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    (await heard(one, other)).finish()
    await until(lambda: other.num_tokens == 0)
    ticket = await heard(other, one)
    assert other.num_tokens == 100  # its own, once
    ticket.finish()
    await until(lambda: one.num_tokens == 0)
    assert (one.feed.num_peers, other.feed.num_peers) == (1, 1)


async def test_what_happens_at_once_goes_in_one_message(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    before = one.feed._num_frames
    tickets = [one.router.dispatch(f"r{number}", num_tokens=10) for number in range(5)]
    await until(lambda: other.num_tokens == 150)
    assert one.feed._num_frames == before + 1
    assert len(tickets) == 5


async def test_who_has_another_secret_is_not_heard(join: Callable[..., Member]) -> None:
    one, other = join(HOSTS[0]), join(HOSTS[1], "another")
    await until(lambda: other.feed.num_malformed, lambda: one.router.dispatch().finish())
    assert (other.num_tokens, other.feed.num_peers) == (0, 0)


async def test_who_is_not_believed_is_warned_of_once(
    join: Callable[..., Member], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = join(HOSTS[0]).feed
    monkeypatch.setattr(peer_feed, "_MAX_WARNINGS", 2)
    with caplog.at_level(logging.WARNING):
        for name in (b"1" * 16, b"1" * 16, b"2" * 1000, b"3" * 16):
            feed._on_message([name, b"", b""])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert feed._unheard == {b"1" * 16, b"2" * 16}
    assert feed.num_malformed == 4


@pytest.mark.parametrize(("more", "num_messages"), [(-1, 1), (0, 1), (1, 2)])
async def test_a_message_has_so_many_events_at_most(join: Callable[..., Member], more: int, num_messages: int) -> None:
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    before, num_requests = one.feed._num_frames, peer_feed._MAX_EVENTS + more
    for number in range(num_requests):
        one.router.dispatch(f"{number}", num_tokens=10)
    await until(lambda: other.num_tokens == 100 + 10 * num_requests)
    assert one.feed._num_frames == before + num_messages


async def test_the_largest_messages_are_read(join: Callable[..., Member]) -> None:
    """An id comes from a header, which may have 64 kB."""
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    for number in range(2500):
        one.router.dispatch(f"{number}" + "\xff" * 60_000, num_tokens=1)
    await until(lambda: other.num_tokens == 100 + 2500)
    assert other.feed.num_lost == 0


async def test_strangers_get_no_memory_and_the_dead_no_connection(join: Callable[..., Member]) -> None:
    feed = join(HOSTS[0]).feed
    for its, max_bytes in ((feed._out, 1024), (feed._in, 2**20)):
        assert its.getsockopt(zmq.MAXMSGSIZE) == max_bytes
        assert (its.getsockopt(zmq.HEARTBEAT_IVL), its.getsockopt(zmq.HEARTBEAT_TIMEOUT)) == (5000, 15_000)


@pytest.mark.parametrize("is_gone", [False, True])
async def test_what_has_come_before_addresses_change_is_heard(
    join: Callable[..., Member], where: HostPort, *, is_gone: bool
) -> None:
    """ZMQ takes the descriptor's change as it connects or disconnects; its own commands bring another."""
    routers = {f"tcp://{host}:{where.port}" for host in HOSTS}
    one, other = (join(host) for host in HOSTS)
    with create_server((HOSTS[0], 0)) as silent:
        more = routers | {f"tcp://{HOSTS[0]}:{silent.getsockname()[1]}"}
        if is_gone:
            other.feed.follow(more)
        ticket = await heard(one, other)
        descriptor = int(other.feed._in.getsockopt(zmq.FD))
        await until(lambda: not select.select([descriptor], [], [], 0.05)[0])
        ticket.finish()
        one.feed._send()
        assert select.select([descriptor], [], [], 10)[0]
        other.feed.follow(routers if is_gone else more)
        await until(lambda: other.num_tokens == 0)


async def test_what_came_before_a_lost_message_is_forgotten(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    one.feed._num_frames += 2
    one.router.dispatch("after", num_tokens=30)
    await until(lambda: other.num_tokens == 30)
    assert other.feed.num_lost == 2


async def test_a_message_that_comes_twice_counts_once(join: Callable[..., Member]) -> None:
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    one.feed._num_frames -= 1
    one.router.dispatch("again", num_tokens=30)
    one.feed._send()
    one.router.dispatch("next", num_tokens=7)
    await until(lambda: other.num_tokens == 107)


async def test_who_is_silent_is_forgotten(join: Callable[..., Member], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    other.feed.expire()
    assert (other.num_tokens, other.feed.num_peers) == (100, 1)
    monkeypatch.setattr(peer_feed, "LIFETIME_SECONDS", -1.0)
    other.feed.expire()
    assert (other.num_tokens, other.feed.num_peers) == (0, 0)
    assert LIFETIME_SECONDS > peer_feed._HEARTBEAT_SECONDS


async def test_a_heartbeat_says_who_waits_without_any_event(
    join: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_feed, "_HEARTBEAT_SECONDS", 0.02)
    one, other = (join(host) for host in HOSTS)
    one.router.waiting = Waiting(3.0, 300.0)
    beating = asyncio.create_task(one.feed._beat())
    await until(lambda: other.router.peers.num_before(float) == 1)
    beating.cancel()


async def test_one_that_is_gone_is_followed_no_more(join: Callable[..., Member], where: HostPort) -> None:
    """What it says meanwhile is lost, as shows when it is there again."""
    one, other = (join(host) for host in HOSTS)
    await heard(one, other)
    other.feed.follow({f"tcp://{HOSTS[1]}:{where.port}"})
    one.router.dispatch("unheard")
    one.feed._send()
    other.feed.follow({f"tcp://{host}:{where.port}" for host in HOSTS})
    await until(lambda: other.feed.num_lost, lambda: one.router.dispatch().finish())


async def test_names_are_resolved_again_and_again(
    join: Callable[..., Member], where: HostPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [OSError("no such host"), {f"tcp://{HOSTS[0]}:{where.port}"}]
    followed: list[set[str]] = []

    async def addresses_of(asked: HostPort) -> set[str]:
        assert asked == where
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(peer_feed, "addresses_of", addresses_of)
    monkeypatch.setattr(peer_feed, "_RESOLVE_SECONDS", 0.01)
    one = join(HOSTS[0])
    monkeypatch.setattr(one.feed, "follow", followed.append)
    running = asyncio.create_task(one.feed.run())
    await until(lambda: len(followed) > 1)
    running.cancel()
    assert followed[0] == answers[-1]


async def test_a_name_stands_for_all_its_addresses() -> None:
    assert await peer_feed.addresses_of(HostPort("127.0.0.1", 5559)) == {"tcp://127.0.0.1:5559"}
    assert await peer_feed.addresses_of(HostPort("::1", 5559)) == {"tcp://[::1]:5559"}


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
