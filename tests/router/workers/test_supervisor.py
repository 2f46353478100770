"""Several workers behind one port: they share its connections, one that dies is replaced, and all end together."""

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from fastapi import FastAPI

from kvasir_router.config import RouterConfig
from kvasir_router.errors import StartupError
from kvasir_router.workers import supervisor
from kvasir_router.workers.admin import create_supervisor_app
from kvasir_router.workers.supervisor import WORKER_START, WorkerStart
from kvasir_router.workers.worker import config_of_worker

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
NUM_WORKERS = 2
HANGS = ("sleep", "60")
COMMAND = (
    sys.executable, "-m", "kvasir_router", "serve", "--workers", str(NUM_WORKERS), "--port", "0", "--admin-port", "0",
)  # fmt: skip


@dataclass
class Running:
    process: asyncio.subprocess.Process
    url: str
    admin_url: str

    @property
    def workers(self) -> set[int]:
        """Their process ids."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return {int(pid) for pid in path.read_text().split()}


@asynccontextmanager
async def supervised(*flags: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(*COMMAND, *flags, stderr=asyncio.subprocess.PIPE)
    reader = None
    try:
        url, admin_url = await asyncio.wait_for(announced_urls(process), 60)
        assert process.stderr is not None
        reader = asyncio.create_task(process.stderr.read())
        yield Running(process, url, admin_url)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reader is not None:
            await reader  # ends with the last worker


async def announced_urls(process: asyncio.subprocess.Process) -> tuple[str, str]:
    assert process.stderr is not None
    async for line in process.stderr:
        if b"workers serve on " in line:
            url, _, rest = line.decode().split("workers serve on ")[1].partition(",")
            return url, rest.split()[-1]
    raise AssertionError("the router ended before it served")


async def ask(url: str) -> bytes:
    """Over a connection of its own."""
    async with aiohttp.ClientSession() as client, client.post(url + CHAT, json=BODY) as response:
        assert response.status == 200
        return await response.read()


async def read(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return response.status, await response.text()


async def condition(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_workers_answer_as_one_router_are_replaced_and_drain_together(engine: Any) -> None:
    """One story, since it takes seconds to start them."""
    async with supervised("--endpoint", engine.url) as router:
        await _answer_as_one(router)
        await _are_replaced(router)
        await _drain_together(router, engine)


async def _answer_as_one(router: Running) -> None:
    assert len(router.workers) == NUM_WORKERS
    for _ in range(10):
        assert (await ask(router.url)).endswith(b"data: [DONE]\n\n")
    for path in ("/health", "/ready", "/debug/routing"):
        assert (await read(router.admin_url + path))[0] == 200
    _, text = await read(router.admin_url + "/metrics")
    assert 'kvasir_router_requests_total{code="200",model="tiny"} 10.0' in text
    assert 'kvasir_router_endpoints{state="ready"} 1.0' in text
    assert (await read(f"{router.admin_url}/endpoints?worker={NUM_WORKERS}"))[0] == 404


async def _are_replaced(router: Running) -> None:
    killed, other = router.workers
    os.kill(killed, signal.SIGKILL)

    async def all_serve() -> bool:
        told = [(await read(f"{router.admin_url}/endpoints?worker={number}"))[0] for number in range(NUM_WORKERS)]
        return killed not in router.workers and told == [200] * NUM_WORKERS

    await condition(all_serve)
    assert other in router.workers
    await ask(router.url)


async def _drain_together(router: Running, engine: Any) -> None:
    engine.gate.clear()
    num_before = len(engine.requests)
    answers = [asyncio.create_task(ask(router.url)) for _ in range(8)]
    await engine.wait_for_requests(num_before + 8)
    router.process.terminate()

    async def is_unready() -> bool:
        return (await read(router.admin_url + "/ready"))[0] == 503

    await condition(is_unready)
    engine.gate.set()
    for answer in answers:
        assert (await answer).endswith(b"data: [DONE]\n\n")
    assert await asyncio.wait_for(router.process.wait(), 20) == 0


async def test_a_worker_does_not_outlive_its_supervisor(engine: Any) -> None:
    """Whose end of its standard input is closed, however that end came."""
    pipe = asyncio.subprocess.PIPE
    worker = await asyncio.create_subprocess_exec(*WORKER_START.command, stdin=pipe, stdout=pipe)
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(pickle.dumps(config_of_worker(RouterConfig(endpoint=(engine.url,)), 0)))
        admin_url = (await asyncio.wait_for(worker.stdout.readline(), 60)).decode().strip()
        assert (await read(admin_url + "/health"))[0] == 200
        worker.stdin.close()
        assert await asyncio.wait_for(worker.wait(), 30) == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


async def test_a_worker_that_cannot_start_ends_the_router(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = RouterConfig(endpoint=("http://127.0.0.1:1",), api_keys_file=tmp_path / "none")
    async with supervisor.supervised(config, 0) as made:
        with pytest.raises(StartupError, match="worker 0 ended with status 2 before it served; its log says why"):
            await asyncio.wait_for(made.all_serve(), 60)
    assert str(tmp_path / "none") in capfd.readouterr().err


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (WorkerStart(("/no/such/program",)), "could not be started"),
        (WorkerStart(HANGS, max_seconds=0.2), r"worker 0 hung for 0\.2 s before it served"),
    ],
    ids=["no program", "hangs"],
)
async def test_a_worker_that_does_not_come_to_serving_ends_the_router_too(start: WorkerStart, end: str) -> None:
    async with supervisor.supervised(RouterConfig(endpoint=("http://a",)), 0, start) as made:
        with pytest.raises(StartupError, match=end):
            await asyncio.wait_for(made.all_serve(), 10)


class Program:
    """A worker's, that the test exchanges."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def becomes(self, command: str | None) -> None:
        """None: there is none."""
        self.path.unlink(missing_ok=True)
        if command is not None:
            made = self.path.with_suffix(".new")
            made.write_text(f"#!/bin/sh\n{command}\n")
            made.chmod(0o700)
            made.rename(self.path)


@pytest.mark.parametrize("broken", ["exec sleep 60", "exit 1", None], ids=["hangs", "ends", "no program"])
async def test_health_fails_while_a_worker_does_not_come_back(engine: Any, tmp_path: Path, broken: str | None) -> None:
    os.mkfifo(tmp_path / "end")
    serves = f"echo {engine.url}; exec cat {tmp_path / 'end'}"  # the engine answers its probes
    program = Program(tmp_path / "worker")
    program.becomes(serves)
    start = WorkerStart((str(program.path),), max_seconds=2.0, again_after_seconds=0.01)
    async with supervisor.supervised(RouterConfig(endpoint=("http://a",)), 0, start) as made:
        app = create_supervisor_app(made.admins, lambda: True, lambda: made.all_start)
        await made.all_serve()
        assert await health(app) == 200

        program.becomes(broken)
        (tmp_path / "end").write_bytes(b"")  # the worker reads to its end, and is over
        await condition(lambda: is_health(app, 503))
        program.becomes(serves)
        await condition(lambda: is_health(app, 200))


async def health(app: FastAPI) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        return (await client.get("/health")).status_code


async def is_health(app: FastAPI, status: int) -> bool:
    return await health(app) == status


def test_what_is_for_the_router_as_a_whole_is_divided() -> None:
    config = RouterConfig(
        endpoint=("http://a",),
        workers=4,
        api_keys_file=Path("keys"),
        tenant_tokens_per_minute=1001,
        tenant_max_in_flight=2,
        max_connections=8000,
        max_held_body_size=400,
        max_body_size=200,
        max_in_flight=512,
    )
    of_worker = config_of_worker(config, 8001)
    assert of_worker.port == 8001
    assert (of_worker.admin_host, of_worker.admin_port) == ("127.0.0.1", 0)
    assert of_worker.peers is None
    assert (of_worker.tenant_tokens_per_minute, of_worker.tenant_max_in_flight) == (250, 1)
    assert (of_worker.max_connections, of_worker.max_held_body_size) == (2000, 200)
    assert of_worker.max_in_flight == 512
