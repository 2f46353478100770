"""A canary of prefill and decode engines beside the revision that serves: requests go to pairs of one revision."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest
from tests.router.conftest import FakeEngine
from tests.router.split_engines import Split

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 100}], "stream": True, "max_tokens": 9}
DOMAIN = "serving.kvasir.dev"


class Slices:
    """A Kubernetes API with a slice an engine."""

    def __init__(self) -> None:
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def put(self, engine: FakeEngine, role: str, revision: str, weight: int | None, *, is_ready: bool = True) -> None:
        name = f"{role}-{revision}"
        labels = {f"{DOMAIN}/role": role, f"{DOMAIN}/revision": revision}
        labels |= {} if weight is None else {f"{DOMAIN}/traffic-weight": str(weight)}
        target = {"kind": "Pod", "uid": name}
        self._slices[name] = {
            "metadata": {"name": name, "resourceVersion": "1", "labels": labels},
            "ports": [{"name": "http", "port": engine.port}],
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": is_ready}, "targetRef": target}],
        }
        self._events.put_nowait({"type": "MODIFIED", "object": self._slices[name]})

    async def list(self) -> tuple[list[Mapping[str, Any]], str]:
        return list(self._slices.values()), "1"

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            yield await self._events.get()


async def ask(client: aiohttp.ClientSession, router: Any, num_requests: int) -> None:
    for _ in range(num_requests):
        async with client.post(router.url + CHAT, json=BODY) as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


def transfers(engine: FakeEngine) -> list[str | None]:
    """Ids of the transfers that it was asked to take part in; None: it was asked alone."""
    return [asked.get("kv_transfer_params", {}).get("transfer_id") for asked in engine.requests]


@pytest.mark.parametrize("policy", ["finishTime", "roundRobin"])
async def test_a_canary_gets_its_weight_in_pairs_of_its_own(
    policy: str, start_router: Any, exit_stack: Any, client: Any, until: Any
) -> None:
    split, slices = Split(start_router, exit_stack), Slices()
    (old_prefill, new_prefill), (old_decode, new_decode) = await split.start_engines(2, 2)
    slices.put(old_prefill, "prefill", "old", None)
    slices.put(old_decode, "decode", "old", None)
    slices.put(new_prefill, "prefill", "new", 25)
    slices.put(new_decode, "decode", "new", 25)
    router = await start_router(
        slice_api=slices, endpoints_service="models/llama:http", remote_prefill_min_tokens=0, policy=policy
    )
    await until(lambda: len([one for one in router.services.describe() if one["models"]]) == 4)
    await ask(client, router, 8)
    assert (len(transfers(old_decode)), len(transfers(new_decode))) == (6, 2)
    assert transfers(old_decode) == transfers(old_prefill)
    assert transfers(new_decode) == transfers(new_prefill)

    slices.put(new_prefill, "prefill", "new", 25, is_ready=False)
    await until(lambda: len(router.services.describe()) == 3)
    await ask(client, router, 8)
    assert transfers(new_decode)[2:] == [None, None], "the other revision prefills nothing for it"
    assert transfers(old_decode) == transfers(old_prefill)
