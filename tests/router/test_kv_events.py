"""A router that follows what engines publish: placement by their caches and their load, its series, /endpoints."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import asdict
from tests.loopback import own_host
from tests.router.prefix_index.publisher import Publisher, publishing
from tests.router.prefix_index.test_tokens import card, chat, ids

from kvasir_router.config import KvEventPorts
from kvasir_router.dialects.dialect import Prompt
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "def hello(name): return name " * 40}]
TEXT = Prompt(b"def", is_token_ids=False, seed=b"", is_text=True)
SIZE = 16


@pytest.fixture
def pair(engines_apart: list[Any]) -> list[Any]:
    """Two engines that tell their tokenizer."""
    for engine in engines_apart:
        engine.tokenizer_card = asdict(card())
    return engines_apart


@pytest.fixture
async def router(pair: list[Any], publishers: list[Publisher], start_router: Any, client: Any, until_page: Any) -> Any:
    """Follows both, and knows their tokenizer."""
    ports = KvEventPorts(publishers[0].event_port, publishers[0].replay_port)
    started = await start_router(*pair, kv_events=ports)
    (service,) = started.services
    await until_page(started, lambda page: all(each["kv_events"]["is_complete"] for each in page))
    async with asyncio.timeout(5):
        while (await service.index.key(TEXT)).chains is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return started


@pytest.fixture
def until_page(client: Any) -> Any:
    """until_page(router, condition): asks /endpoints until it holds; the page, ordered by url."""

    async def wait(router: Any, condition: Any) -> list[dict[str, Any]]:
        async with asyncio.timeout(5):
            while True:
                async with client.get(router.admin_url + "/endpoints") as response:
                    page = sorted(await response.json(), key=lambda endpoint: str(endpoint["url"]))
                if condition(page):
                    return page
                await asyncio.sleep(0.005)

    return wait


def stored(tokens: list[int]) -> list[Any]:
    num_blocks = len(tokens) // SIZE
    digests = [f"block {number}".encode() for number in range(num_blocks)]
    return ["BlockStored", digests, None, tokens[: num_blocks * SIZE], SIZE, None, "GPU"]


def prompt_tokens() -> list[int]:

    return ids(PromptTokenizer(card(), PieceCache(10**6)).tokens(chat(MESSAGES)))


async def ask(client: Any, router: Any, **fields: Any) -> None:
    async with client.post(router.url + CHAT, json={"model": "tiny", "messages": MESSAGES} | fields) as response:
        assert response.status == 200
        await response.read()


async def test_a_conversation_goes_where_its_engine_says_it_is_cached(
    pair: list[Any], publishers: list[Publisher], router: Any, client: Any, until_page: Any
) -> None:
    tokens = prompt_tokens()
    publishers[1].publish(stored(tokens))
    await until_page(router, lambda page: page[1]["prefix_blocks"] == len(tokens) // SIZE)
    for _ in range(3):
        await ask(client, router)
    assert [len(engine.requests) for engine in pair] == [0, 3]


async def test_series_tell_what_engines_published(
    publishers: list[Publisher], router: Any, client: Any, until_page: Any
) -> None:
    tokens = prompt_tokens()
    publishers[1].publish(stored(tokens), ["Moved"])
    publishers[1].publish_load("instance")
    page = await until_page(router, lambda page: page[1]["kv_events"]["num_load_reports"] == 1)
    assert page[1]["kv_events"]["num_events"] == {"BlockStored": 1}
    async with client.get(router.admin_url + "/metrics") as response:
        text = await response.text()
    for line in (
        'kvasir_router_kv_events_total{type="BlockStored"} 1.0',
        'kvasir_router_kv_events_total{type="AllBlocksCleared"} 0.0',
        "kvasir_router_kv_events_skipped_total 1.0",
        "kvasir_router_kv_event_gaps_total 0.0",
        "kvasir_router_kv_event_losses_total 0.0",
        "kvasir_router_load_reports_total 1.0",
        f"kvasir_router_kv_blocks {len(tokens) // SIZE}.0",
    ):
        assert line in text


async def test_a_report_of_load_is_the_endpoints(publishers: list[Publisher], router: Any, until_page: Any) -> None:
    publishers[0].publish_load("instance", num_running=3)
    page = await until_page(router, lambda page: page[0]["kv_usage"] is not None)
    assert (page[0]["prefill_tokens"], page[0]["kv_capacity_tokens"]) == (340, 60_000)


async def test_a_restarted_engine_is_learned_anew(publishers: list[Publisher], router: Any, until_page: Any) -> None:
    publishers[0].publish(stored(prompt_tokens()))
    await until_page(router, lambda page: page[0]["prefix_blocks"] > 0)
    publishers[0].close()
    with publishing(publishers[0].event_port, publishers[0].replay_port, process=2.0, host=own_host(1)) as second:
        await until_page(router, lambda page: page[0]["prefix_blocks"] == 0 and page[0]["kv_events"]["is_complete"])
        second.publish(stored(prompt_tokens()[:32]))
        await until_page(router, lambda page: page[0]["prefix_blocks"] == 2)
        publishers[0] = second


async def test_without_the_flag_nothing_is_followed(pair: list[Any], start_router: Any, until_page: Any) -> None:
    router = await start_router(*pair)
    page = await until_page(router, lambda page: True)
    assert [endpoint["kv_events"] for endpoint in page] == [None, None]
