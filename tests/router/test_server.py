"""The process and its admin port: probes, metrics, endpoints by Kubernetes, a port in use, a clean stop."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from kvasir_router.cli import main
from kvasir_router.config import RouterConfig
from kvasir_router.server import running

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 500}], "stream": True}


async def read(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with client.get(url) as response:
        return response.status, await response.text()


async def test_probes_hold_even_without_a_ready_engine(engine: Any, start_router: Any, client: Any) -> None:
    engine.is_ready = False
    router = await start_router(engine)
    assert (await read(client, router.admin_url + "/health"))[0] == 200
    assert (await read(client, router.admin_url + "/ready"))[0] == 200


async def test_metrics_tell_what_happened(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine)
    for _ in range(2):
        async with client.post(router.url + CHAT, json=BODY) as response:
            await response.read()
    async with client.post(router.url + CHAT, json=BODY | {"model": "nope"}) as response:
        assert response.status == 404
    _, text = await read(client, router.admin_url + "/metrics")
    for line in (
        'kvasir_router_requests_total{code="200",model="tiny"} 2.0',
        'kvasir_router_requests_total{code="404",model=""} 1.0',
        'kvasir_router_revision_requests_total{code="200",revision=""} 2.0',
        f'kvasir_router_picks_total{{endpoint="{engine.url}",policy="finishTime"}} 2.0',
        'kvasir_router_time_to_first_byte_seconds_count{model="tiny"} 2.0',
        'kvasir_router_request_duration_seconds_count{model="tiny"} 2.0',
        "kvasir_router_overhead_seconds_count 2.0",
        "kvasir_router_prefix_hit_tokens_total 320.0",
        "kvasir_router_in_flight 0.0",
        "kvasir_router_queue_depth 0.0",
        'kvasir_router_endpoints{state="ready"} 1.0',
    ):
        assert line in text


async def test_endpoints_page_shows_what_is_known(engine: Any, start_router: Any, client: Any, until: Any) -> None:
    engine.metrics = (
        'kvasir_kv_cache_usage_ratio 0.5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    )
    router = await start_router(engine)
    await until(lambda: router.services.describe()[0]["kv_usage"] == 0.5)
    async with client.get(router.admin_url + "/endpoints") as response:
        (shown,) = await response.json()
    assert (shown["url"], shown["state"], shown["models"]) == (engine.url, "ready", ["tiny"])
    assert shown["kv_capacity_tokens"] == 1600


class OneSlice:
    """A Kubernetes API with one EndpointSlice, changed by `set_ready`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._events: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def _slice(self, is_ready: bool) -> dict[str, Any]:
        return {
            "metadata": {"name": "s", "resourceVersion": "1"},
            "ports": [{"name": "http", "port": self._port}],
            "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": is_ready}}],
        }

    def set_ready(self, is_ready: bool) -> None:
        self._events.put_nowait({"type": "MODIFIED", "object": self._slice(is_ready)})

    async def list(self) -> tuple[list[Mapping[str, Any]], str]:
        return [self._slice(False)], "1"

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            yield await self._events.get()


async def test_endpoints_follow_the_services_slices(engine: Any, start_router: Any, client: Any, until: Any) -> None:
    api = OneSlice(engine.port)
    router = await start_router(slice_api=api, endpoints_service="models/llama:http")
    assert router.services.describe() == []
    api.set_ready(True)
    async with client.post(router.url + CHAT, json=BODY) as response:
        assert response.status == 200
    api.set_ready(False)
    await until(lambda: router.services.describe() == [])


DOMAIN = "serving.kvasir.dev"


class TwoRevisions:
    """A Kubernetes API with a slice for each revision; the first has a weight that can be changed."""

    def __init__(self, canary: Any, stable: Any) -> None:
        self._engines = {"new": canary, "old": stable}
        self._events: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def _slice(self, revision: str, weight: str | None = None, *, is_ready: bool = True) -> dict[str, Any]:
        engine = self._engines[revision]
        labels = {f"{DOMAIN}/role": "serve", f"{DOMAIN}/revision": revision}
        labels |= {} if weight is None else {f"{DOMAIN}/traffic-weight": weight}
        target = {"kind": "Pod", "uid": revision}
        return {
            "metadata": {"name": revision, "resourceVersion": "1", "labels": labels},
            "ports": [{"name": "http", "port": engine.port}],
            "endpoints": [
                {"addresses": ["127.0.0.1"], "conditions": {"ready": is_ready}, "targetRef": target},
            ],
        }

    def change(self, weight: str | None, *, is_ready: bool = True) -> None:
        self._events.put_nowait({"type": "MODIFIED", "object": self._slice("new", weight, is_ready=is_ready)})

    async def list(self) -> tuple[list[Mapping[str, Any]], str]:
        return [self._slice("new", "25"), self._slice("old")], "1"

    async def watch(self, resource_version: str) -> AsyncIterator[Mapping[str, Any]]:
        while True:
            yield await self._events.get()


async def ask(client: aiohttp.ClientSession, router: Any, count: int) -> list[str]:
    """The engines that answered."""
    names = []
    for _ in range(count):
        async with client.post(router.url + CHAT, json=BODY) as response:
            assert response.status == 200
            await response.read()
            names.append(response.headers["x-engine"])
    return names


async def test_a_canary_gets_its_weight_of_the_requests_and_a_new_one_without_restart(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    api = TwoRevisions(*engines)
    router = await start_router(slice_api=api, endpoints_service="models/llama:http")
    await until(lambda: len([one for one in router.services.describe() if one["models"]]) == 2)
    assert (await ask(client, router, 8)).count("one") == 2
    api.change("75")
    await until(lambda: {one["traffic_weight"] for one in router.services.describe()} == {75.0, None})
    assert (await ask(client, router, 8)).count("one") == 6
    api.change("75", is_ready=False)
    await until(lambda: len(router.services.describe()) == 1)
    assert await ask(client, router, 4) == ["two"] * 4


async def test_requests_and_failures_are_counted_by_revision_as_long_as_it_has_endpoints(
    engines: Any, start_router: Any, client: Any, until: Any
) -> None:
    api = TwoRevisions(*engines)
    router = await start_router(slice_api=api, endpoints_service="models/llama:http", policy="roundRobin")
    await until(lambda: len([one for one in router.services.describe() if one["models"]]) == 2)
    engines[0].die_before_headers = True
    assert await ask(client, router, 4) == ["two"] * 4
    _, text = await read(client, router.admin_url + "/metrics")
    assert 'kvasir_router_revision_requests_total{code="200",revision="old"} 4.0' in text
    assert 'kvasir_router_revision_upstream_errors_total{reason="lost",revision="new"} 1.0' in text
    api.change("25", is_ready=False)
    await until(lambda: len(router.services.describe()) == 1)
    _, text = await read(client, router.admin_url + "/metrics")
    assert 'revision="new"' not in text
    assert 'kvasir_router_revision_requests_total{code="200",revision="old"} 4.0' in text


async def test_two_colons_serve_both_ports_on_ipv6_and_ipv4(engine: Any, start_router: Any, client: Any) -> None:
    router = await start_router(engine, host="::")
    for host in ("[::1]", "127.0.0.1"):
        for url, path in ((router.url, "/v1/models"), (router.admin_url, "/health")):
            assert (await read(client, url.replace("[::]", host) + path))[0] == 200


async def test_an_engine_on_ipv6_is_probed_scraped_and_asked(
    engine: Any, start_router: Any, client: Any, until: Any
) -> None:
    await engine.stop()
    engine.host, engine.metrics = "::1", "kvasir_kv_cache_usage_ratio 0.5\n"
    await engine.start()
    router = await start_router(engine)
    assert await ask(client, router, 1) == ["one"]
    await until(lambda: router.services.describe()[0]["kv_usage"] == 0.5)
    assert router.services.describe()[0]["url"] == f"http://[::1]:{engine.port}"


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--endpoint", "http://127.0.0.1:1", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"kvasir-router: 127.0.0.1:{port} is in use; choose another port with --port\n"


def test_a_cluster_that_cannot_be_reached_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    assert main(["serve", "--endpoints-service", "a/b:8000", "--port", "0", "--admin-port", "0"]) == 1
    assert "neither a service account nor KUBECONFIG works" in capsys.readouterr().err


async def test_an_answer_that_outlasts_the_drain_ends_with_an_error(engine: Any, client: Any) -> None:
    engine.gate.clear()
    config = RouterConfig(endpoint=(engine.url,), port=0, admin_port=0, shutdown_timeout=1.0)
    async with running(config) as router:
        answer = asyncio.create_task(_streamed(client, router.url))
        await engine.wait_for_requests(1)
    assert b'"code":"router_stopping"' in await answer


async def test_who_comes_while_it_drains_is_answered_and_told_to_go(engine: Any, client: Any) -> None:
    """On the connection it has or on a new one: `kubectl port-forward` ends all streams where one is refused."""
    engine.later_gate.clear()
    async with _router_process(engine) as router:
        async with client.post(router.url + CHAT, json=BODY) as first:
            await first.content.readany()
            router.process.send_signal(signal.SIGTERM)
            await router.is_not_ready(client)
            async with aiohttp.ClientSession() as other, other.post(router.url + CHAT, json=BODY) as second:
                assert second.headers["connection"] == "close"
                engine.later_gate.set()
                assert (await second.read()).endswith(b"data: [DONE]\n\n")
            assert (await first.read()).endswith(b"data: [DONE]\n\n")
        async with client.post(router.url + CHAT, json=BODY) as third:
            assert third.headers["connection"] == "close"
            assert (await third.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_an_answer_that_begins_after_sigterm_announces_its_connections_end(engine: Any, client: Any) -> None:
    engine.gate.clear()
    async with _router_process(engine) as router:
        answer = asyncio.create_task(client.post(router.url + CHAT, json=BODY))
        await engine.wait_for_requests(1)
        router.process.send_signal(signal.SIGTERM)
        await router.is_not_ready(client)
        engine.gate.set()
        async with await answer as response:
            assert response.headers["connection"] == "close"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_a_router_that_nobody_asks_ends_after_its_delay_whatever_probes_it(engine: Any, client: Any) -> None:
    begin = asyncio.get_running_loop().time()
    async with _router_process(engine, "--shutdown-delay", "1s") as router:
        router.process.send_signal(signal.SIGTERM)
        ended = asyncio.create_task(router.process.wait())
        while not ended.done():
            with contextlib.suppress(aiohttp.ClientError):
                await read(client, router.url + "/v1/models")
        assert await ended == 0
    assert asyncio.get_running_loop().time() - begin > 1


async def test_the_second_half_of_a_drain_is_for_those_who_are_answered(engine: Any, client: Any) -> None:
    engine.gate.clear()
    async with _router_process(engine, "--shutdown-delay", "0s", "--shutdown-timeout", "4s") as router:
        answer = asyncio.create_task(_streamed(client, router.url))
        await engine.wait_for_requests(1)
        router.process.send_signal(signal.SIGTERM)
        await router.is_not_ready(client)
        engine.status, status = 500, 500
        while status == 500:
            async with client.post(router.url + CHAT, json=BODY) as late:
                status, text = late.status, await late.text()
        assert (status, late.headers["retry-after"], late.headers["connection"]) == (503, "1", "close")
        assert "router_stopping" in text
        engine.status = 200
        engine.gate.set()
        assert (await answer).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_a_second_signal_ends_a_router_at_once(engine: Any, client: Any) -> None:
    engine.gate.clear()
    async with _router_process(engine) as router:
        answer = asyncio.create_task(_streamed(client, router.url))
        await engine.wait_for_requests(1)
        router.process.send_signal(signal.SIGINT)
        await router.is_not_ready(client)
        router.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(router.process.wait(), 20) == 0
        assert b'"code":"router_stopping"' in await answer


async def test_the_process_takes_its_secret_from_the_environment(
    engine: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_ROUTER_SECRET", "s3")
    async with _router_process(engine) as router:
        await _streamed(client, router.url)
    assert engine.headers[0]["x-kvasir-router-secret"] == "s3"


async def test_each_message_is_an_object_that_names_its_request(engine: Any, client: Any) -> None:
    async with _router_process(engine, "--log-format", "json") as router:
        async with client.get(router.url + "/v1/no", headers={"x-request-id": "mine"}) as response:
            assert response.status == 404
        router.process.terminate()
        messages = [json.loads(line) for line in (await router.log).splitlines()]
    [refusal] = [each for each in messages if each.get("request_id") == "mine"]
    assert (refusal["status"], refusal["level"], "/v1/no" in refusal["message"]) == (404, "info", True)
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, messages))


@dataclass(frozen=True)
class _Process:
    process: asyncio.subprocess.Process
    url: str
    admin_url: str
    log: "asyncio.Task[bytes]"

    async def is_not_ready(self, client: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(20):
            while (await read(client, self.admin_url + "/ready"))[0] != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def _router_process(engine: Any, *flags: str) -> AsyncIterator[_Process]:
    command = ("-m", "kvasir_router", "serve", "--endpoint", engine.url, "--port", "0", "--admin-port", "0", *flags)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        urls = await asyncio.wait_for(_announced_urls(process), 60)
        log = asyncio.create_task(process.stderr.read())  # else it may wait for a reader
        yield _Process(process, *urls, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await log


async def _streamed(client: aiohttp.ClientSession, url: str) -> bytes:
    async with client.post(url + CHAT, json=BODY) as response:
        return await response.read()


async def _announced_urls(process: asyncio.subprocess.Process) -> list[str]:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"serving on " in line:
            return re.findall(r"http://[0-9.:]+", line.decode())[:2]
    raise AssertionError("the router ended before it served")
