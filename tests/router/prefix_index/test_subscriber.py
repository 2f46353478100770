"""A subscriber on real ZMQ sockets: gaps, restarts of either side, and engines that say nothing or nonsense."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from tests.router.prefix_index.publisher import Publisher, publishing, removed, stored

from kvasir_router.prefix_index.kv_events import BlockRemoved, BlockStored, EventBatch
from kvasir_router.prefix_index.subscriber import EventAddress, Subscriber, Timing

pytestmark = pytest.mark.anyio
QUICK = Timing(verify_interval=0.2, replay_timeout=0.3)
PATIENT = Timing(verify_interval=60, replay_timeout=60)


class Heard:
    """What a listener was told: block names, and the rest in capitals."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.reports: list[bytes] = []

    def reset(self, *, is_complete: bool) -> None:
        self.words.append("RESET, COMPLETE" if is_complete else "RESET")

    def lost(self) -> None:
        self.words.append("LOST")

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            assert isinstance(event, (BlockStored, BlockRemoved))
            sign = "" if isinstance(event, BlockStored) else "-"
            self.words.extend(f"{sign}{name.decode()}" for name in event.digests if isinstance(name, bytes))

    def report(self, payload: bytes) -> str | None:
        self.reports.append(payload)
        return None if payload == b"nonsense" else payload.decode()

    def since_reset(self) -> list[str]:
        last = max(index for index, word in enumerate(self.words) if word.startswith("RESET"))
        return self.words[last:]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with publishing() as running:
        yield running


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as running:
        yield running


@pytest.fixture
async def subscribe(
    context: zmq.Context[zmq.Socket[bytes]], heard: Heard, exit_stack: Any
) -> Callable[..., Subscriber]:
    def start(engine: Publisher, timing: Timing = QUICK, host: str = "127.0.0.1") -> Subscriber:
        address = EventAddress.beside(f"http://{host}:8000", engine.event_port, engine.replay_port)
        subscriber = Subscriber(context, address, heard, lambda: 3.5, timing)
        subscriber.start()
        exit_stack.callback(subscriber.close)
        return subscriber

    return start


async def live(publisher: Publisher, heard: Heard, until: Any) -> None:
    """Until what is published comes: nobody announces that a subscription has arrived."""

    def has_come() -> bool:
        publisher.send(b"kvasir-load", 0, b"alive")
        return bool(heard.reports)

    await until(has_come)


async def settled(subscriber: Subscriber, until: Any) -> None:
    """Until it has looked twice: at the start, and when its connection was there."""
    await until(lambda: subscriber.statistics.num_replays == 2 and not subscriber.is_replaying)


async def test_a_router_that_starts_late_learns_what_was_stored_before(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    publisher.publish(stored("a"), stored("b", "a"))
    publisher.publish(removed("b"))
    subscribe(publisher)
    await until(lambda: heard.words == ["RESET", "RESET, COMPLETE", "a", "b", "-b"])


async def test_live_messages_follow(publisher: Publisher, heard: Heard, subscribe: Any, until: Any) -> None:
    subscriber = subscribe(publisher, PATIENT)
    await live(publisher, heard, until)
    await settled(subscriber, until)
    assert heard.words[-1:] == ["RESET, COMPLETE"]
    publisher.publish(stored("a"))
    publisher.publish(stored("b", "a"))
    await until(lambda: heard.words[-2:] == ["a", "b"])
    assert subscriber.statistics.lag_seconds == 2.5
    assert subscriber.statistics.num_events == {"BlockStored": 2}


async def test_a_gap_is_filled_before_what_follows_it(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    publisher.publish(stored("a"))
    subscriber = subscribe(publisher, PATIENT)
    await live(publisher, heard, until)
    await settled(subscriber, until)
    assert heard.words[-1:] == ["a"]
    publisher.publish(stored("b", "a"), is_lost=True)
    publisher.publish(removed("b"), is_lost=True)
    publisher.publish(stored("c", "a"))
    await until(lambda: heard.since_reset()[1:] == ["a", "b", "-b", "c"])
    assert (subscriber.statistics.num_gaps, subscriber.statistics.num_losses) == (1, 0)


async def test_a_last_message_that_was_lost_is_found_without_another(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    subscribe(publisher)
    await live(publisher, heard, until)
    publisher.publish(stored("a"), is_lost=True)
    await until(lambda: heard.words[-1:] == ["a"])


async def test_a_gap_beyond_the_engines_memory_is_a_loss(heard: Heard, subscribe: Any, until: Any) -> None:
    with publishing(buffer_steps=1) as publisher:
        publisher.publish(stored("a"))
        subscriber = subscribe(publisher, PATIENT)
        await live(publisher, heard, until)
        await settled(subscriber, until)
        publisher.publish(stored("b", "a"), is_lost=True)
        publisher.publish(stored("c", "a"))
        await until(lambda: heard.since_reset()[1:] == ["a", "LOST", "c"])


async def test_an_engine_without_replay_is_followed_and_its_gaps_are_losses(
    heard: Heard, subscribe: Any, until: Any
) -> None:
    with publishing(has_replay=False) as publisher:
        subscriber = subscribe(publisher, Timing(verify_interval=60, replay_timeout=0.1))
        await live(publisher, heard, until)
        await until(lambda: subscriber.statistics.num_failed_replays > 0)
        publisher.publish(stored("a"))
        await until(lambda: heard.words[-1:] == ["a"])
        publisher.publish(stored("b", "a"), is_lost=True)
        publisher.publish(stored("c", "a"))
        await until(lambda: heard.words[-3:] == ["a", "LOST", "c"])


async def test_an_engine_that_comes_back_as_another_process_is_learned_anew(
    heard: Heard, subscribe: Any, until: Any
) -> None:
    with publishing() as first:
        for name in "abc":
            first.publish(stored(name))
        subscribe(first, PATIENT)
        await until(lambda: heard.words[-1:] == ["c"])
    with publishing(first.event_port, first.replay_port, process=2.0) as second:
        for name in "xyzw":  # more than the first one, so that nothing looks older
            second.publish(stored(name), is_lost=True)
        await until(lambda: heard.since_reset() == ["RESET, COMPLETE", *"xyzw"])


async def test_an_engine_that_comes_back_empty_holds_nothing(heard: Heard, subscribe: Any, until: Any) -> None:
    with publishing() as first:
        first.publish(stored("a"))
        subscribe(first, PATIENT)
        await until(lambda: heard.words[-1:] == ["a"])
    with publishing(first.event_port, first.replay_port):
        await until(lambda: heard.since_reset() == ["RESET, COMPLETE"])


async def test_a_load_report_of_another_instance_voids_what_was_known(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    publisher.publish(stored("a"))
    subscriber = subscribe(publisher, PATIENT)
    await live(publisher, heard, until)
    await settled(subscriber, until)
    num_resets = heard.words.count("RESET, COMPLETE")
    publisher.send(b"kvasir-load", 1, b"alive")
    publisher.send(b"kvasir-load", 2, b"another")
    publisher.send(b"kvasir-load", 3, b"another")
    await until(lambda: heard.reports[-2:] == [b"another", b"another"])
    await until(lambda: heard.words[-1:] == ["a"] and heard.words.count("RESET, COMPLETE") == num_resets + 1)


async def test_a_restart_that_was_seen_by_its_numbers_is_not_seen_again_by_its_load(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    for name in "ab":
        publisher.publish(stored(name))
    subscriber = subscribe(publisher, PATIENT)
    await live(publisher, heard, until)
    await settled(subscriber, until)
    publisher.begin_again(process=2.0)
    publisher.publish(stored("x"))
    await until(lambda: heard.since_reset() == ["RESET, COMPLETE", "x"] and not subscriber.is_replaying)
    num_words = len(heard.words)
    publisher.send(b"kvasir-load", 1, b"another")
    await until(lambda: heard.reports[-1:] == [b"another"])
    assert len(heard.words) == num_words


async def test_resync_learns_everything_again(publisher: Publisher, heard: Heard, subscribe: Any, until: Any) -> None:
    publisher.publish(stored("a"))
    subscriber = subscribe(publisher, PATIENT)
    await until(lambda: heard.words[-1:] == ["a"])
    subscriber.resync()
    await until(lambda: heard.words[-3:] == ["RESET", "RESET, COMPLETE", "a"])


async def test_nonsense_is_counted_and_the_rest_is_read(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    subscriber = subscribe(publisher, PATIENT)
    await live(publisher, heard, until)
    await settled(subscriber, until)
    assert heard.words[-1:] == ["RESET, COMPLETE"]
    publisher.send(b"", 0, b"no batch")
    publisher.send(b"kvasir-load", 1, b"nonsense")
    publisher.send_frames(b"", b"short", b"")
    publisher.send_frames(b"two", b"frames")
    publisher.send(b"", 1, b"\x93\x01\x91\x92\xa5Moved\x90\xc0")  # [1, [["Moved", []]], None]
    publisher.num_messages = 2
    publisher.publish(stored("a"))
    await until(lambda: heard.words[-1:] == ["a"])
    assert (subscriber.statistics.num_malformed, subscriber.statistics.num_skipped) == (4, 1)


async def test_of_several_ranks_at_one_address_the_first_is_followed(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    publisher.publish(stored("a"), rank=1)
    publisher.publish(stored("b"), rank=0)
    publisher.publish(stored("c"), rank=1)
    subscriber = subscribe(publisher)
    await until(lambda: heard.words[-2:] == ["a", "c"])
    assert subscriber.statistics.num_skipped == 1


async def test_an_engine_that_begins_to_listen_later_is_heard(heard: Heard, subscribe: Any, until: Any) -> None:
    with publishing() as closed:
        pass
    subscribe(closed)
    with publishing(closed.event_port, closed.replay_port) as publisher:
        publisher.publish(stored("a"))
        await until(lambda: heard.words[-1:] == ["a"])


async def test_a_subscriber_of_nobody_ends_at_once(heard: Heard, subscribe: Any) -> None:
    with publishing() as closed:
        pass
    subscribe(closed, PATIENT).close()


async def test_much_at_once_lets_others_have_their_turn(
    publisher: Publisher, heard: Heard, subscribe: Any, until: Any
) -> None:
    for number in range(100):
        publisher.publish(stored(f"{number}"))
    seen: list[int] = []

    def look() -> bool:
        seen.append(len(heard.words))
        return len(heard.words) >= 102

    subscribe(publisher, PATIENT)
    async with asyncio.timeout(5):
        while not look():  # noqa: ASYNC110 - what is asked is how the turns are shared
            await asyncio.sleep(0)
    assert max(later - earlier for earlier, later in itertools.pairwise(seen)) <= 33


async def test_ipv6_is_spoken_too(heard: Heard, subscribe: Any, until: Any) -> None:
    with publishing(host="[::1]") as publisher:
        publisher.publish(stored("a"))
        subscribe(publisher, host="[::1]")
        await until(lambda: heard.words[-1:] == ["a"])


def test_sockets_are_on_the_engines_own_host() -> None:
    assert EventAddress.beside("http://10.0.0.7:8000", 5557, 5558) == EventAddress(
        "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"
    )
    assert EventAddress.beside("http://[fd00::1]:8000", 1, 2) == EventAddress("tcp://[fd00::1]:1", "tcp://[fd00::1]:2")
