"""What the router may hold within its container's memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvasir_router.config import RouterConfig
from kvasir_router.memory import memory_limit_bytes, most_unread_bytes, prefix_memory, text_cache_bytes, within_limit
from kvasir_router.prefix_index.approximate import BYTES_PER_BLOCK

pytestmark = pytest.mark.anyio
MIB = 2**20


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "536870912\n"}, 512 * MIB),
        ({"memory/memory.limit_in_bytes": "1048576\n"}, MIB),
    ],
)
def test_the_containers_limit_is_found(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit_bytes(tmp_path) == limit


@pytest.mark.parametrize("limit", [64 * MIB, 512 * MIB, 2**40])
def test_all_that_grows_fits_into_three_fourths_of_the_limit_and_no_flag_is_passed(limit: int) -> None:
    given = RouterConfig(endpoint=("http://a",))
    config = within_limit(given, limit)
    prefixes = prefix_memory(limit)
    prefixes.num_endpoints = 1
    index_bytes = 200 * config.kv_index_size + BYTES_PER_BLOCK * prefixes.max_blocks_per_endpoint
    held_bytes = config.max_held_body_size + index_bytes + text_cache_bytes(limit) + (most_unread_bytes(limit) or 0)
    assert held_bytes + 17_000 * config.max_connections <= 0.75 * limit
    assert config.max_body_size <= config.max_held_body_size <= given.max_held_body_size
    assert config.kv_index_size <= given.kv_index_size


def test_without_a_limit_the_flags_hold() -> None:
    given = RouterConfig(endpoint=("http://a",))
    assert within_limit(given, None) == given


async def test_beyond_it_a_request_is_refused_by_the_limits_name(engine: Any, start_router: Any, client: Any) -> None:
    engine.gate.clear()
    router = await start_router(engine, tuned={"memory_limit_bytes": 320_000})  # 100,000 for bodies
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 70_000}]}
    held = client.post(router.url + "/v1/chat/completions", json=body)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(held)
        await engine.wait_for_requests(1)
        async with client.post(router.url + "/v1/chat/completions", json=body) as second:
            assert (second.status, second.headers["retry-after"]) == (503, "1")
            assert "--max-held-body-size, or 5/16 of its memory limit" in await second.text()
        engine.gate.set()
        assert (await first).status == 200
