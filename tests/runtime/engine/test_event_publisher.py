"""KV events and load reports on real sockets, read as any subscriber would."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvasir_operator.local.network import free_port
from kvasir_runtime.config import KvEventsConfig
from kvasir_runtime.engine.load_report import LoadReport
from kvasir_runtime.engine.router_feed import END_OF_REPLAY, EventPublisher, at_rank
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.kv_cache.events import BlockRemoved, EventBatch

WAIT_MILLISECONDS = 10_000
REPORT = LoadReport(
    num_running=1, num_waiting=0, waiting_uncached_tokens=0, running_uncached_tokens=0, kv_used_tokens=16,
    kv_capacity_tokens=64, steps_per_second=2.0, prefill_tokens_per_second=None, arrived=["a"], instance="cafe",
)  # fmt: skip
Publish = Callable[..., EventPublisher]
Connect = Callable[..., zmq.Socket[bytes]]


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Publish]:
    publishers: list[EventPublisher] = []

    def start(rank: int | None = None, **config) -> EventPublisher:
        endpoints = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
        publishers.append(EventPublisher(KvEventsConfig(enable_kv_cache_events=True, **(endpoints | config)), rank))
        return publishers[-1]

    yield start
    for publisher in publishers:
        publisher.close()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def open_socket(kind: int, endpoint: str = "events", **options: int) -> zmq.Socket[bytes]:
        opened = context.socket(kind)
        opened.setsockopt(zmq.RCVTIMEO, WAIT_MILLISECONDS)
        for name, value in options.items():
            opened.setsockopt(getattr(zmq, name), value)
        opened.connect(endpoint if "://" in endpoint else f"ipc://{tmp_path}/{endpoint}")
        sockets.append(opened)
        return opened

    yield open_socket
    for opened in sockets:
        opened.close(linger=0)
    context.term()


def events(number: int) -> list[BlockRemoved]:
    return [BlockRemoved([b"%d" % number])]


def subscribe(connect: Connect, publisher: EventPublisher, topic: bytes = b"", **options: int) -> zmq.Socket[bytes]:
    """Connected, as a first message shows: what is published before that is lost, as by any PUB."""
    reader = connect(zmq.SUB, **options)
    reader.setsockopt(zmq.SUBSCRIBE, topic)
    deadline = time.monotonic() + WAIT_MILLISECONDS / 1000
    while not reader.poll(10):
        assert time.monotonic() < deadline, "the subscriber never connected"
        publisher.publish_events(events(0)) if topic != b"kvasir-load" else publisher.publish_load(REPORT)
    while reader.poll(10):
        reader.recv_multipart()
    return reader


def ask(reader: zmq.Socket[bytes], start: int, *before: bytes) -> list[list[bytes]]:
    reader.send_multipart([*before, start.to_bytes(8, "big")])
    answer = [reader.recv_multipart()]
    while answer[-1][-2] != END_OF_REPLAY:
        answer.append(reader.recv_multipart())
    return answer


def test_a_subscriber_gets_topic_sequence_and_events(publish, connect):
    publisher = publish(topic="kv-events")
    reader = subscribe(connect, publisher, b"kv-events")
    publisher.publish_events(events(1))
    publisher.publish_events(events(2))
    (topic, first, payload), (_, second, _) = reader.recv_multipart(), reader.recv_multipart()
    batch = msgspec.msgpack.decode(payload, type=EventBatch)
    assert (topic, batch.events, batch.data_parallel_rank) == (b"kv-events", events(1), None)
    assert abs(batch.ts - time.time()) < 60
    assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1


def test_a_data_parallel_rank_has_sockets_of_its_own_and_says_its_number(publish, connect):
    publish(rank=0)
    publisher = publish(rank=1)
    reader = connect(zmq.DEALER, "replay-1")
    publisher.publish_events(events(1))
    [(_, payload), _] = ask(reader, 0)
    assert msgspec.msgpack.decode(payload, type=EventBatch).data_parallel_rank == 1


def test_ranks_listen_on_ports_one_behind_the_other():
    config = KvEventsConfig(endpoint="tcp://[::1]:5557", replay_endpoint="tcp://*:6000")
    third = at_rank(config, 2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://[::1]:5559", "tcp://*:6002")
    assert at_rank(KvEventsConfig(endpoint="tcp://*:5557"), 1).replay_endpoint is None


def test_load_has_a_topic_and_sequences_of_its_own(publish, connect):
    publisher = publish()
    reader = subscribe(connect, publisher, b"kvasir-load")
    publisher.publish_events(events(1))
    publisher.publish_load(REPORT)
    publisher.publish_load(REPORT)
    (topic, first, payload), (_, second, _) = reader.recv_multipart(), reader.recv_multipart()
    assert (topic, msgspec.msgpack.decode(payload)) == (
        b"kvasir-load",
        [1, 1, 0, 0, 0, 16, 64, 2.0, None, ["a"], "cafe", 1, None],
    )
    assert int.from_bytes(second, "big") == int.from_bytes(first, "big") + 1


@pytest.mark.parametrize("before", [(), (b"",)])
def test_what_was_missed_is_sent_again_up_to_an_end_marker(publish, connect, before):
    """A DEALER asks; REQ's empty frame in front comes back in front."""
    publisher = publish()
    for number in range(5):
        publisher.publish_events(events(number))
    *answer, end = ask(connect(zmq.DEALER, "replay"), 3, *before)
    assert [int.from_bytes(message[-2], "big") for message in answer] == [3, 4]
    assert msgspec.msgpack.decode(answer[0][-1], type=EventBatch).events == events(3)
    assert end == [*before, (-1).to_bytes(8, "big", signed=True), b""]
    assert all(message[: len(before)] == list(before) for message in answer)


def test_a_reader_closes_a_gap_by_a_replay(publish, connect):
    publisher = publish()
    reader = subscribe(connect, publisher)
    publisher.publish_events(events(1))
    last = int.from_bytes(reader.recv_multipart()[1], "big")
    reader.close()
    for number in (2, 3):
        publisher.publish_events(events(number))
    *answer, _ = ask(connect(zmq.DEALER, "replay"), last + 1)
    assert [msgspec.msgpack.decode(payload, type=EventBatch).events for _, payload in answer] == [events(2), events(3)]


def test_a_request_that_is_no_sequence_is_ignored_and_others_are_answered(publish, connect):
    publisher = publish()
    publisher.publish_events(events(0))
    reader = connect(zmq.DEALER, "replay")
    reader.send(b"nonsense!")
    assert len(ask(reader, 0)) == 2


def test_a_reader_that_left_in_the_middle_does_not_stop_the_replays_of_others(publish, connect):
    publisher = publish()
    publisher.publish_events(events(0))
    for _ in range(3):
        gone = connect(zmq.DEALER, "replay")
        gone.send((0).to_bytes(8, "big"))
        gone.close(linger=1000)
    assert len(ask(connect(zmq.DEALER, "replay"), 0)) == 2


def test_publishing_to_nobody_and_to_one_who_never_reads_takes_no_time(publish, connect):
    publisher = publish(hwm=10, buffer_steps=10)
    reader = subscribe(connect, publisher, RCVHWM=1)
    start = time.thread_time()
    for _ in range(20_000):
        publisher.publish_events(events(1))
    assert time.thread_time() - start < 5.0
    sequences = []
    while reader.poll(100):
        sequences.append(int.from_bytes(reader.recv_multipart()[1], "big"))
    assert len(sequences) < 20_000, "the rest was dropped, which the reader sees by the sequences"
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "*"])
def test_it_listens_on_ipv4_and_ipv6(publish, connect, address):
    port = free_port("127.0.0.1")
    publisher = publish(endpoint=f"tcp://{address}:{port}", replay_endpoint=None)
    for host in ["127.0.0.1", "[::1]"] if address == "*" else [address]:
        reader = connect(zmq.SUB, f"tcp://{host}:{port}", IPV6=1)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        deadline = time.monotonic() + 10
        while not reader.poll(10):
            assert time.monotonic() < deadline, f"nothing came by {host}"
            publisher.publish_events(events(0))


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_address_in_use_is_told_by_its_key(publish, key):
    taken = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    publish(endpoint=taken, replay_endpoint=None)
    with pytest.raises(ConfigurationError, match=f"listen on {key} {taken}: Address already in use; stop what uses it"):
        publish(**{key: taken})


def test_after_closing_the_address_is_free_again(publish):
    endpoints = {key: f"tcp://127.0.0.1:{free_port('127.0.0.1')}" for key in ("endpoint", "replay_endpoint")}
    publish(**endpoints).close()
    publish(**endpoints)
