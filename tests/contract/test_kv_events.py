"""The bytes that engines publish for routers, decoded by vLLM's documented shapes, which are written down here by hand.

Positions count: vLLM's events are arrays, tagged by the name of their class, and fields were only ever added behind.
"""

import msgspec
import pytest
import zmq

from kvasir_runtime.config import KvEventsConfig
from kvasir_runtime.engine.load_report import LoadReport
from kvasir_runtime.engine.router_feed import EventPublisher
from kvasir_runtime.kv_cache.blocks import hash_blocks
from kvasir_runtime.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventLog
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup

TOKENS = [70_000, *range(1, 9)]
FIRST, SECOND = hash_blocks(None, TOKENS[:8], 4, (b"salt",))


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """As of vLLM 0.14; before 0.11 it ended with lora_id."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def published(publish) -> list[bytes]:
    """The frames of the one message that is published by `publish(publisher)`."""
    publisher = EventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint="ipc://@kvasir-test-kv-events"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.connect("ipc://@kvasir-test-kv-events")
    try:
        for _ in range(1000):
            publish(publisher)
            if reader.poll(10):
                return reader.recv_multipart()
        raise AssertionError("nothing came")
    finally:
        reader.close(linger=0)
        context.term()
        publisher.close()


def events_of_a_request() -> list[KvEvent]:
    """A prompt's two full blocks come, and are lost to another sequence, the tail first."""
    groups = (KvGroup((0,)),)
    log = KvEventLog(4, groups)
    kv = KvCache(3, 4, groups, enable_prefix_caching=True, event_log=log)
    blocks = kv.empty((b"salt",))
    kv.grow(blocks, len(TOKENS))
    kv.wrote(kv.offer(TOKENS, blocks, len(TOKENS)))
    kv.release(blocks)
    kv.grow(kv.empty(), 12)
    return log.take()


def test_vllms_readers_understand_our_events() -> None:
    events = events_of_a_request()
    topic, sequence, payload = published(lambda publisher: publisher.publish_events(events))
    batch = msgspec.msgpack.decode(payload, type=Batch)

    assert (topic, len(sequence), batch.data_parallel_rank) == (b"", 8, None)
    assert batch.events == [
        Cleared(),
        Stored([FIRST, SECOND], None, TOKENS[:8], 4, None, "GPU", None, [("salt",), None]),
        Removed([SECOND, FIRST], "GPU"),
    ]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (AllBlocksCleared(), ["AllBlocksCleared"]),
        (BlockRemoved([b"h"]), ["BlockRemoved", [b"h"], "GPU"]),
        (
            BlockStored([b"h"], b"p", [1, 2], 2),
            ["BlockStored", [b"h"], b"p", [1, 2], 2, None, "GPU", None, None],
        ),
    ],
)
def test_an_event_is_an_array_that_begins_with_its_name(event: KvEvent, expected: list[object]) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event)) == expected


def test_a_load_report_is_an_array_in_the_agreed_order() -> None:
    report = LoadReport(
        num_running=2, num_waiting=3, waiting_uncached_tokens=4, running_uncached_tokens=5, kv_used_tokens=6,
        kv_capacity_tokens=7, steps_per_second=8.5, prefill_tokens_per_second=9.5, arrived=["a", "b"], instance="cafe",
    )  # fmt: skip
    topic, sequence, payload = published(lambda publisher: publisher.publish_load(report))

    assert (topic, len(sequence)) == (b"kvasir-load", 8)
    assert msgspec.msgpack.decode(payload) == [1, 2, 3, 4, 5, 6, 7, 8.5, 9.5, ["a", "b"], "cafe", 1, None]
