"""Tenants, priorities, deadlines and late binding as clients meet them, through a whole router."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Of two tenants; each key is its tenant's name."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"acme": "acme", "umbrella": "umbrella"}))
    return path


async def ask(
    client: aiohttp.ClientSession, router: Any, tenant: str = "acme", *, length: int = 4, **fields: Any
) -> tuple[int, str, str | None]:
    """Status, the error's code, and Retry-After."""
    headers = {"authorization": f"Bearer {tenant}"} | fields.pop("headers", {})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * length}], **fields}
    async with client.post(router.url + CHAT, json=body, headers=headers) as response:
        answer = await response.json()
        return response.status, answer.get("error", {}).get("code", ""), response.headers.get("retry-after")


async def test_a_tenant_over_its_rate_gets_429_and_the_time_to_come_back(
    engine: Any, keys: Path, start_router: Any, client: Any
) -> None:
    router = await start_router(engine, api_keys_file=keys, tenant_tokens_per_minute=6000)
    assert (await ask(client, router, length=20_000))[0] == 200
    status, code, retry_after = await ask(client, router, length=20_000)
    assert (status, code) == (429, "rate_limit_exceeded")
    assert 35 <= int(retry_after or 0) <= 42  # some 5,020 tokens at 100 a second, of which 980 are there
    assert (await ask(client, router, "umbrella", length=20_000))[0] == 200


async def test_what_the_queue_refuses_is_not_charged(engine: Any, keys: Path, start_router: Any, client: Any) -> None:
    router = await start_router(
        engine, api_keys_file=keys, tenant_tokens_per_minute=6000, max_in_flight=1, max_queue_size=0
    )
    engine.gate.clear()
    first = asyncio.create_task(ask(client, router))
    await engine.wait_for_requests(1)
    assert (await ask(client, router, length=20_000))[1] == "queue_full"
    engine.gate.set()
    await first
    assert (await ask(client, router, length=20_000))[0] == 200


async def test_a_tenants_requests_beyond_its_limit_wait_and_others_do_not(
    engine: Any, keys: Path, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(engine, api_keys_file=keys, tenant_max_in_flight=1)
    engine.gate.clear()
    tasks = [asyncio.create_task(ask(client, router, tenant)) for tenant in ("acme", "acme", "umbrella")]
    await engine.wait_for_requests(2)
    (service,) = router.services
    await until(lambda: service.admission.num_waiting == 1)
    assert {headers["x-kvasir-tenant"] for headers in engine.headers} == {"acme", "umbrella"}
    engine.gate.set()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_a_tenants_pressing_request_overtakes_its_others(
    engine: Any, keys: Path, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(engine, api_keys_file=keys, max_in_flight=1)
    (service,) = router.services
    engine.gate.clear()
    tasks = [asyncio.create_task(ask(client, router))]
    await engine.wait_for_requests(1)
    for num_waiting, priority in enumerate((0, -1), start=1):
        tasks.append(asyncio.create_task(ask(client, router, priority=priority)))
        await until(lambda num_waiting=num_waiting: service.admission.num_waiting == num_waiting)
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert [asked.get("priority") for asked in engine.requests] == [None, -1, 0]


async def test_a_deadline_that_passes_in_the_queue_is_503(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, max_in_flight=1)
    engine.gate.clear()
    first = asyncio.create_task(ask(client, router))
    await engine.wait_for_requests(1)
    status, code, retry_after = await ask(client, router, headers={"x-kvasir-deadline-seconds": "0.05"})
    assert (status, code, retry_after) == (503, "deadline_exceeded", "5")
    engine.gate.set()
    assert (await first)[0] == 200


async def test_a_deadline_that_is_no_number_is_400(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    assert (await ask(client, router, headers={"x-kvasir-deadline-seconds": "soon"}))[:2] == (400, "invalid_deadline")
    assert engine.requests == []


async def test_what_waits_is_told_by_service_and_tenant(
    engine: Any, keys: Path, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(engine, api_keys_file=keys, max_in_flight=1)
    (service,) = router.services
    engine.gate.clear()
    tasks = [asyncio.create_task(ask(client, router, tenant)) for tenant in ("acme", "umbrella", "umbrella")]
    await until(lambda: service.admission.num_waiting == 2)
    async with client.get(router.admin_url + "/metrics") as response:
        text = await response.text()
    assert "kvasir_router_queue_depth 2.0" in text
    waiting = [line for line in text.splitlines() if line.startswith("kvasir_router_queued_requests{")]
    assert sum(float(line.split()[-1]) for line in waiting) == 2
    assert 'tenant="umbrella"' in "".join(waiting)
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_requests_wait_here_while_the_engine_has_enough_to_prefill(
    engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    router = await start_router(engine, max_prefill_queue=1e-6)
    (service,) = router.services

    async def stream(length: int = 4) -> int:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * length}], "stream": True}
        async with client.post(router.url + CHAT, json=body) as response:
            await response.read()
            return int(response.status)

    (endpoint,) = service.registry
    for work in (100, 1000):  # from now on the router knows that prompts wait for one another, and how long
        endpoint.load.prefill.observe(work, work / 1000, time.perf_counter())
    assert await stream() == 200
    engine.gate.clear()
    first = asyncio.create_task(stream(length=1_000_000))
    await engine.wait_for_requests(2)
    second = asyncio.create_task(stream())
    await until(lambda: service.admission.num_waiting == 1)
    assert len(engine.requests) == 2
    engine.gate.set()
    assert [await first, await second] == [200, 200]
