"""One gateway over many services, beside the same gateway over one: memory, rest, and what a request waits for it.

    python -m benchmarks.gateway_scale [--services 500] [--engines 2] [--requests 2000]

The Kubernetes API and all engines are this process: an API server's wire format on one port, and every engine an
address of the loopback network on another. The gateway is a process of its own; its CPU and memory are the kernel's
figures of it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import aiohttp
import yaml
from aiohttp import web
from tests.router.kube_objects import engine_slice, manifest

from kvasir_operator.local.network import free_port

RESULTS = Path(__file__).parent / "results"
REST_SECONDS = 20.0
NUM_CLIENTS = 32
TURN_REQUESTS = 100
LIMIT_SECONDS = 120.0
API_GROUPS = {
    "/apis/serving.kvasir.dev/v1alpha1/inferenceservices": "services",
    "/apis/discovery.k8s.io/v1/endpointslices": "slices",
}


@dataclass(frozen=True)
class Engine:
    model: str
    host: str


class Cluster:
    """So many services, each with engines of its own."""

    def __init__(self, num_services: int, engines_per_service: int) -> None:
        addresses = (f"127.{a}.{b}.{c}" for a in range(1, 255) for b in range(256) for c in range(1, 255))
        self.engines = [
            Engine(f"model-{number}", next(addresses))
            for number in range(num_services)
            for _ in range(engines_per_service)
        ]
        self.models = list(dict.fromkeys(engine.model for engine in self.engines))
        self.model_of = {engine.host: engine.model for engine in self.engines}
        self.num_probes = 0
        self.port = 0

    def objects(self, kind: str) -> list[dict[str, Any]]:
        if kind == "services":
            return [manifest(model, aliases=(f"{model}-alias",)) for model in self.models]
        return [self._slice(model) for model in self.models]

    def _slice(self, model: str) -> dict[str, Any]:
        hosts = [engine.host for engine in self.engines if engine.model == model]
        endpoints = [{"addresses": [host], "conditions": {"ready": True}} for host in hosts]
        return engine_slice(model, self.port) | {"endpoints": endpoints}

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
        items = self.objects(API_GROUPS[request.path])
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})


class EngineConnection(asyncio.Protocol):
    """As cheap as an HTTP server can be here: it takes the same cores as the gateway. A request comes in one piece."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._host = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        path = data.split(b" ", 2)[1]
        if data.startswith(b"GET"):
            self._cluster.num_probes += 1
        if path == b"/v1/models":
            self._answer(json.dumps({"data": [{"id": self._cluster.model_of[self._host]}]}).encode())
        else:
            self._answer(b'{"choices": [{"text": "yes"}]}' if data.startswith(b"POST") else b"")

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


@contextlib.asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[str]:
    """The cluster's API at the URL; all its engines on one port of their addresses."""
    api = web.Application()
    for path in API_GROUPS:
        api.router.add_get(path, cluster.list_or_watch)
    runner = web.AppRunner(api, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    loop = asyncio.get_running_loop()
    engines = await loop.create_server(lambda: EngineConnection(cluster), "0.0.0.0", 0, backlog=4096)
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        cluster.port = engines.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        engines.close()
        await runner.cleanup()


@dataclass(frozen=True)
class Gateway:
    url: str
    admin_url: str
    pid: int

    @property
    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_mb(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6


@contextlib.asynccontextmanager
async def running_gateway(api_url: str, folder: Path) -> AsyncIterator[Gateway]:
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(api_url)))
    port, admin_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [sys.executable, "-m", "kvasir_router", "serve", "--gateway", "*", "--log-level", "warning"]
    command += ["--port", str(port), "--admin-port", str(admin_port)]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        yield Gateway(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _kubeconfig(api_url: str) -> dict[str, Any]:
    return {
        "current-context": "fake",
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "clusters": [{"name": "fake", "cluster": {"server": api_url}}],
        "users": [{"name": "fake", "user": {}}],
    }


@dataclass(frozen=True)
class Subject:
    """A gateway over so many services."""

    cluster: Cluster
    gateway: Gateway

    @property
    def engine_url(self) -> str:
        return f"http://{self.cluster.engines[0].host}:{self.cluster.port}"


@dataclass(frozen=True)
class Row:
    name: str
    values: tuple[str, ...]  # a subject each


async def measure(options: argparse.Namespace) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        subjects = [await _running(stack, size, options.engines) for size in (1, options.services)]
        seconds = [await _until_all_ready(subject, client) for subject in subjects]
        rows = [Row("until all engines are known to be ready, s", _texts(seconds, 1))]
        for step in (_at_rest(subjects), _requests(subjects, client, options.requests)):
            rows += [row async for row in step]
        return rows


async def _running(stack: contextlib.AsyncExitStack, num_services: int, engines_per_service: int) -> Subject:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-scale-")))
    cluster = Cluster(num_services, engines_per_service)
    api_url = await stack.enter_async_context(serving(cluster))
    return Subject(cluster, await stack.enter_async_context(running_gateway(api_url, folder)))


async def _at_rest(subjects: Sequence[Subject]) -> AsyncIterator[Row]:
    cpu = [subject.gateway.cpu_seconds for subject in subjects]
    probes = [subject.cluster.num_probes for subject in subjects]
    await asyncio.sleep(REST_SECONDS)
    shares = [(one.gateway.cpu_seconds - before) / REST_SECONDS for one, before in zip(subjects, cpu, strict=True)]
    rates = [(one.cluster.num_probes - before) / REST_SECONDS for one, before in zip(subjects, probes, strict=True)]
    yield Row("at rest: resident, MB", _texts([subject.gateway.resident_mb for subject in subjects], 0))
    yield Row("at rest: CPU, % of a core", _texts([100 * share for share in shares], 1))
    yield Row("at rest: probes a second", _texts(rates, 1))


async def _requests(
    subjects: Sequence[Subject], client: aiohttp.ClientSession, num_requests: int
) -> AsyncIterator[Row]:
    """Every service is asked once before. The subjects take turns, so that whatever else the machine does hits all."""
    for subject in subjects:
        await _ask_all(client, subject.gateway.url, subject.cluster.models)
    alone: list[list[float]] = [[] for _ in subjects]
    through: list[list[float]] = [[] for _ in subjects]
    for start in range(0, num_requests, TURN_REQUESTS):
        for number, subject in enumerate(subjects):
            models = _turn(subject.cluster.models, start)
            alone[number] += await _ask_all(client, subject.engine_url, models)
            through[number] += await _ask_all(client, subject.gateway.url, models)
    for name, quantile in (("p50", 50), ("p99", 99)):
        added = [
            1000 * (_percentile(slow, quantile) - _percentile(fast, quantile))
            for slow, fast in zip(through, alone, strict=True)
        ]
        yield Row(f"added {name} at concurrency 1, ms", _texts(added, 2))
    rates = [await _throughput(client, subject, num_requests) for subject in subjects]
    yield Row(f"requests/s at concurrency {NUM_CLIENTS}", _texts(rates, 0))
    yield Row("after that: resident, MB", _texts([subject.gateway.resident_mb for subject in subjects], 0))


def _turn(models: Sequence[str], start: int) -> list[str]:
    return [models[number % len(models)] for number in range(start, start + TURN_REQUESTS)]


def _texts(values: Sequence[float], num_digits: int) -> tuple[str, ...]:
    return tuple(f"{value:.{num_digits}f}" for value in values)


async def _until_all_ready(subject: Subject, client: aiohttp.ClientSession) -> float:
    """Seconds; the gateway has just been started."""
    begin = time.perf_counter()
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{subject.gateway.admin_url}/endpoints") as response:
                    known = await response.json()
                if len([one for one in known if one["models"]]) == len(subject.cluster.engines):
                    return time.perf_counter() - begin
            await asyncio.sleep(0.1)


async def _ask_all(client: aiohttp.ClientSession, url: str, models: Sequence[str]) -> list[float]:
    """Seconds of each request, one after the other."""
    seconds = []
    for model in models:
        begin = time.perf_counter()
        await _ask(client, url, model)
        seconds.append(time.perf_counter() - begin)
    return seconds


async def _throughput(client: aiohttp.ClientSession, subject: Subject, num_requests: int) -> float:
    models = [subject.cluster.models[number % len(subject.cluster.models)] for number in range(num_requests)]
    begin = time.perf_counter()
    url = subject.gateway.url
    await asyncio.gather(*(_ask_all(client, url, models[start::NUM_CLIENTS]) for start in range(NUM_CLIENTS)))
    return len(models) / (time.perf_counter() - begin)


async def _ask(client: aiohttp.ClientSession, url: str, model: str) -> None:
    body = {"model": model, "prompt": "Is this fast? " * 20}
    async with client.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{url} answered {response.status}: {answer[:200]!r}")


def _percentile(values: Sequence[float], quantile: int) -> float:
    return statistics.quantiles(values, n=100)[quantile - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=500)
    parser.add_argument("--engines", type=int, default=2, help="of each service")
    parser.add_argument("--requests", type=int, default=2000, help="of each measurement")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    report = f"{heading(options)}\n\n{render(rows, options.services)}\n"
    path = RESULTS / f"gateway_scale-{date.today()}.md"
    path.write_text(report)
    print(f"{report}\nwritten to {path}")


def render(rows: Sequence[Row], num_services: int) -> str:
    lines = [f"| | 1 service | {num_services} services |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {row.name} | {' | '.join(row.values)} |" for row in rows)])


def heading(options: argparse.Namespace) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    flags = f"--services {options.services} --engines {options.engines} --requests {options.requests}"
    machine = f"{cpu.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}"
    return f"""# One gateway, {options.services} services, {date.today()}

`python -m benchmarks.gateway_scale {flags}` at commit
{commit or "none"}; {machine}.

Two gateways run side by side, and share these cores with the client, the Kubernetes API and {options.engines} engines a
service. Requests go to all services in turn; what is added is the difference to the same requests sent to an engine, in
turns of {TURN_REQUESTS}."""


if __name__ == "__main__":
    main()
