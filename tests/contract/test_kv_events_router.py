"""An engine's own publisher and a router's own subscriber: what the one caches is what the other matches."""

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from tests.contract.rendered import router_config, runtime_configs, service_with
from tests.runtime.cli.conftest import free_ports_in_a_row

from kvasir_operator.local.network import reserve_network
from kvasir_router.config import KvEventPorts
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.prefix_index.mixed import MixedIndex, Threads
from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_router.prefix_index.subscriber import Timing
from kvasir_router.service.event_feed import EventFeed
from kvasir_router.service.load_report import LoadReport
from kvasir_runtime.config import KvEventsConfig
from kvasir_runtime.engine.load_report import LoadReport as EngineLoadReport
from kvasir_runtime.engine.router_feed import EventPublisher
from kvasir_runtime.kv_cache.blocks import SequenceBlocks
from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.kv_cache.kv_cache import KvCache
from kvasir_runtime.kv_cache.spec import KvGroup

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:8000"
TOKENS = list(range(100, 140))
SIZE = 4


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Engine:
    """A prefix cache, and the sockets that its events go to."""

    def __init__(
        self, config: KvEventsConfig, *, num_blocks: int = 64, buffer_steps: int = 100, rank: int | None = None
    ) -> None:
        groups = (KvGroup((0,)),)
        self.log = KvEventLog(SIZE, groups)
        self.kv = KvCache(num_blocks, SIZE, groups, enable_prefix_caching=True, event_log=self.log)
        self.publisher = EventPublisher(dataclasses.replace(config, buffer_steps=buffer_steps), rank)
        self.step()

    def step(self) -> None:
        if events := self.log.take():
            self.publisher.publish_events(events)

    def compute(self, tokens: list[int], salt: tuple[bytes, ...] = ()) -> SequenceBlocks:
        """A request's prompt, in a step of its own; its blocks stay cached until others need their memory."""
        blocks = self.kv.empty(salt)
        self.kv.grow(blocks, len(tokens))
        self.kv.wrote(self.kv.offer(tokens, blocks, len(tokens)))
        self.step()
        return blocks

    def num_cached(self, tokens: list[int]) -> int:
        """By its own word; it leaves at least one token to compute."""
        return self.kv.match([*tokens, 0], self.kv.empty()).num_tokens


class Router:
    def __init__(self, ports: KvEventPorts, url: str = URL) -> None:
        self.url = url
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.threads = Threads()
        self.reports: list[LoadReport] = []
        loop = asyncio.get_running_loop()
        self.precise = PreciseIndex(BlockBudget(10_000))
        self.feed = EventFeed(
            ports, self.precise, lambda url, report: self.reports.append(report), self.context, loop.time,
            timing=Timing(verify_interval=0.2, replay_timeout=1.0),
        )  # fmt: skip
        approximate = ApproximatePrefixIndex(100, 100, SIZE, 4.0)
        self.index = MixedIndex(approximate, self.precise, self.threads, frozenset, self.feed.resync)
        self.feed.follow({Address(url)})

    async def num_matched(self, tokens: list[int], salt: str | None = None) -> int:
        raw = {} if salt is None else {"cache_salt": msgspec.Raw(msgspec.json.encode(salt))}
        key = await self.index.key(Prompt(array("I", tokens).tobytes(), True, b"", **raw))
        return self.index.match(key, asyncio.get_running_loop().time()).get(self.url, 0)

    async def until_matched(self, num_tokens: int, tokens: list[int], salt: str | None = None) -> None:
        async with asyncio.timeout(5):
            while await self.num_matched(tokens, salt) != num_tokens or not self.precise.is_complete(self.url):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def close(self) -> None:
        self.feed.close()
        self.threads.close()
        self.context.destroy(linger=0)


@pytest.fixture
def ports() -> KvEventPorts:
    """Each with the next one free as well, for another rank."""
    first = free_ports_in_a_row(4)
    return KvEventPorts(first, first + 2)


def listening(address: str, ports: KvEventPorts) -> KvEventsConfig:
    return KvEventsConfig(
        enable_kv_cache_events=True,
        load_hz=20,
        endpoint=f"tcp://{address}:{ports.events}",
        replay_endpoint=f"tcp://{address}:{ports.replay}",
    )


@pytest.fixture
def start_engine(ports: KvEventPorts) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def start(config: KvEventsConfig | None = None, **options: Any) -> Engine:
            engine = Engine(config or listening("127.0.0.1", ports), **options)
            stack.callback(engine.publisher.close)
            return engine

        yield start


@pytest.fixture
async def start_router(ports: KvEventPorts) -> AsyncIterator[Callable[..., Router]]:
    with contextlib.ExitStack() as stack:

        def start(followed: KvEventPorts = ports, url: str = URL) -> Router:
            router = Router(followed, url)
            stack.callback(router.close)
            return router

        yield start


async def test_what_an_engine_computes_is_matched(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine, router = start_engine(), start_router()
    await router.until_matched(0, TOKENS)
    engine.compute(TOKENS[:11])
    await router.until_matched(8, TOKENS)
    engine.compute(TOKENS)
    await router.until_matched(40, TOKENS)


async def test_a_salted_prompt_is_matched_by_its_salt(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine, router = start_engine(), start_router()
    engine.compute(TOKENS, (b"mine",))
    await router.until_matched(40, TOKENS, "mine")
    assert (await router.num_matched(TOKENS), await router.num_matched(TOKENS, "yours")) == (0, 0)


async def test_evictions_are_seen(start_engine: Callable[..., Engine], start_router: Callable[..., Router]) -> None:
    engine, router = start_engine(num_blocks=12), start_router()
    engine.kv.release(engine.compute(TOKENS))
    await router.until_matched(40, TOKENS)
    engine.compute([7] * 12)
    engine.step()
    assert 0 < engine.num_cached(TOKENS) < 40
    await router.until_matched(engine.num_cached(TOKENS), TOKENS)


async def test_a_router_that_starts_after_the_engine_has_forgotten_its_messages_knows_all(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine = start_engine(buffer_steps=2)
    for length in range(4, 41, 4):
        engine.compute(TOKENS[:length])
    router = start_router()
    await router.until_matched(40, TOKENS)
    engine.compute([7] * 8)
    await router.until_matched(8, [7] * 8)


async def test_a_restarted_engine_holds_nothing(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine, router = start_engine(), start_router()
    engine.compute(TOKENS)
    await router.until_matched(40, TOKENS)
    engine.publisher.close()
    start_engine()
    await router.until_matched(0, TOKENS)


REPORT = EngineLoadReport(
    num_running=2, num_waiting=3, waiting_uncached_tokens=4, running_uncached_tokens=5, kv_used_tokens=6,
    kv_capacity_tokens=7, steps_per_second=8.5, prefill_tokens_per_second=None, arrived=["a", "b"],
    instance="cafe",
)  # fmt: skip


OF_ONE_RANK = msgspec.structs.replace(REPORT, data_parallel_size=2)
OF_BOTH_RANKS = LoadReport(4, 6, 8, 10, 12, 14, 17.0, None, ("a", "b"), "cafe", 2)


async def until_reported(router: Router, *publishers: EventPublisher, report: LoadReport, of: EngineLoadReport) -> None:
    async with asyncio.timeout(5):
        while report not in router.reports:
            for publisher in publishers:
                publisher.publish_load(of)
            await asyncio.sleep(0.005)


async def test_an_engines_load_is_read(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine, router = start_engine(), start_router()
    await router.until_matched(0, TOKENS)
    report = LoadReport(2, 3, 4, 5, 6, 7, 8.5, None, ("a", "b"), "cafe")
    await until_reported(router, engine.publisher, report=report, of=REPORT)


async def test_an_engine_tells_where_it_exchanges_kv(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    engine, router = start_engine(), start_router()
    await router.until_matched(0, TOKENS)
    report = LoadReport(2, 3, 4, 5, 6, 7, 8.5, None, ("a", "b"), "cafe", kv_transfer_port=5600)
    told = msgspec.structs.replace(REPORT, kv_transfer_port=5600)
    await until_reported(router, engine.publisher, report=report, of=told)


async def test_data_parallel_ranks_are_one_endpoint_that_has_cached_what_one_of_them_has(
    start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    """The second rank's cache is older than the router's knowledge of it."""
    first, second = start_engine(rank=0), start_engine(rank=1)
    router = start_router()
    second.compute(TOKENS)
    await router.until_matched(0, TOKENS)
    await until_reported(router, first.publisher, second.publisher, report=OF_BOTH_RANKS, of=OF_ONE_RANK)
    await router.until_matched(40, TOKENS)
    first.compute(TOKENS[:8])
    second.kv.release(second.compute([7] * 12))
    await router.until_matched(12, [7] * 12)
    await router.until_matched(40, TOKENS)


@pytest.fixture
def address() -> Iterator[str]:
    """Of this test alone, like a pod's: what is said of a pod's ports holds there."""
    with reserve_network() as network:
        yield network.next_address()


async def test_routers_follow_each_rank_on_the_ports_that_the_operator_tells_it_and_the_engine(
    address: str, start_engine: Callable[..., Engine], start_router: Callable[..., Router]
) -> None:
    service = service_with(model={"source": "pvc://models/big"}, parallelism={"data": 2})
    [config], followed = runtime_configs(service), router_config(service).kv_events
    assert config.cache.kv_events_config is not None
    assert config.cache.kv_events_config.replay_endpoint is not None
    published = dataclasses.replace(
        config.cache.kv_events_config,
        endpoint=config.cache.kv_events_config.endpoint.replace("*", address),
        replay_endpoint=config.cache.kv_events_config.replay_endpoint.replace("*", address),
    )
    engines = [start_engine(published, rank=rank) for rank in range(config.parallel.data_parallel_size)]
    for rank, engine in enumerate(engines):  # before there is a router: it has them from each rank's replay
        engine.compute([rank] * 40)
    router = start_router(followed, f"http://{address}:8000")
    await until_reported(router, *(engine.publisher for engine in engines), report=OF_BOTH_RANKS, of=OF_ONE_RANK)
    for rank, engine in enumerate(engines):
        await router.until_matched(40, [rank] * 40)
        engine.compute([10 + rank] * 8)
    for rank in range(len(engines)):
        await router.until_matched(8, [10 + rank] * 8)
