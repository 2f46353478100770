"""Starts the workers, replaces those that die, and ends them all: `kvasir-router serve --workers N`.

The port is theirs together (SO_REUSEPORT): the kernel deals out connections. The supervisor binds it too and never
listens, so that nobody else gets it while a worker is replaced.
"""

import asyncio
import contextlib
import logging
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import uvloop

from kvasir_http.connections import ConnectionLimits, Connections
from kvasir_router.config import RouterConfig
from kvasir_router.errors import StartupError
from kvasir_router.listener import listening, reserved, url_of
from kvasir_router.relay.http_server import http_server
from kvasir_router.server import set_up_logging
from kvasir_router.workers.admin import WorkerAdmins, create_supervisor_app
from kvasir_router.workers.worker import config_of_worker

logger = logging.getLogger(__name__)

# Beyond the time that a worker takes to drain.
_STOP_SECONDS = 10.0
_ADMIN_CONNECTIONS = ConnectionLimits(total=256, per_peer=64)


@dataclass(frozen=True)
class WorkerStart:
    command: tuple[str, ...] = (sys.executable, "-m", "kvasir_router.workers.worker")
    max_seconds: float = 60.0
    """It is imports for the most part: seconds, on a crowded machine too. What hangs is killed and tried again."""
    again_after_seconds: float = 1.0


WORKER_START = WorkerStart()


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartupError."""
    set_up_logging(config.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_signal(config))


async def _serve_until_signal(config: RouterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    admin_host = config.admin_host or config.host
    with (
        reserved(config.host, config.port, "--port") as port,
        listening(admin_host, config.admin_port, "--admin-port") as admin_socket,
    ):
        async with supervised(config, port.getsockname()[1]) as supervisor:
            app = create_supervisor_app(
                supervisor.admins, lambda: not supervisor.is_stopping, lambda: supervisor.all_start
            )
            async with http_server(app, admin_socket, Connections(_ADMIN_CONNECTIONS), shutdown_timeout_seconds=1.0):
                await _first_of(supervisor.all_serve(), stop.wait())
                told = config.workers, url_of(port), url_of(admin_socket)
                logger.info("%d workers serve on %s, probes and metrics on %s", *told)
                await stop.wait()
                await supervisor.stop()


async def _first_of(*awaited: Coroutine[Any, Any, Any]) -> None:
    """Raises as the first of them that ends."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def supervised(config: RouterConfig, port: int, start: WorkerStart = WORKER_START) -> AsyncIterator["Supervisor"]:
    """Workers that are kept running while the block is; none is left at its end."""
    async with WorkerAdmins() as admins:
        supervisor = Supervisor(config, port, admins, start)
        tasks = [asyncio.create_task(supervisor.keep(number)) for number in range(config.workers)]
        try:
            yield supervisor
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class Supervisor:
    def __init__(self, config: RouterConfig, port: int, admins: WorkerAdmins, start: WorkerStart) -> None:
        self.admins = admins
        self._worker_start = start
        self.is_stopping = False
        self._num_workers = config.workers
        self._stop_seconds = config.shutdown_timeout + _STOP_SECONDS
        self._config = pickle.dumps(config_of_worker(config, port))
        self._processes: dict[int, Process] = {}
        self._has_served: set[int] = set()
        self._failed_to_start: set[int] = set()
        self._all_serve: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def all_start(self) -> bool:
        """False while some worker's last start did not come to serving: the next one may not either."""
        return self.is_stopping or not self._failed_to_start

    async def all_serve(self) -> None:
        """Raises StartupError where one ends, or is killed, before it has ever served."""
        await self._all_serve

    async def keep(self, number: int) -> None:
        """One worker after the other."""
        while not self.is_stopping:
            end = await self._run_worker(number)
            if self.is_stopping:
                break
            if not self._all_serve.done() and number not in self._has_served:
                self._all_serve.set_exception(StartupError(f"worker {number} {end} before it served; its log says why"))
                break
            logger.error("worker %d %s; another takes its place", number, end)
            await asyncio.sleep(self._worker_start.again_after_seconds)

    async def stop(self) -> None:
        """All drain, each as long as it may."""
        self.is_stopping = True
        for process in self._processes.values():
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_seconds):
                await asyncio.gather(*(process.wait() for process in self._processes.values()))

    async def _run_worker(self, number: int) -> str:
        """Returns how it has ended; where it takes too long to serve, or this is cancelled, it is killed."""
        try:
            process = await asyncio.create_subprocess_exec(*self._worker_start.command, stdin=PIPE, stdout=PIPE)
        except OSError as error:  # the machine may have room for it later
            self._failed_to_start.add(number)
            return f"could not be started ({error})"
        self._processes[number] = process
        try:
            await self._start(number, process)
            return f"ended with status {await process.wait()}"
        except TimeoutError:
            return f"hung for {self._worker_start.max_seconds:g} s"
        finally:
            self.admins.ended(number)
            del self._processes[number]
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _start(self, number: int, process: Process) -> None:
        """Returns when it serves, or has ended. Raises TimeoutError."""
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdin.is_closing():  # it may have ended already
            process.stdin.write(self._config)
        try:
            async with asyncio.timeout(self._worker_start.max_seconds):
                admin_url = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            self._failed_to_start.add(number)
            raise
        if admin_url:
            self._serves(number, admin_url)
        else:
            self._failed_to_start.add(number)

    def _serves(self, number: int, admin_url: str) -> None:
        self.admins.serves(number, admin_url)
        self._failed_to_start.discard(number)
        self._has_served.add(number)
        if len(self._has_served) == self._num_workers and not self._all_serve.done():
            self._all_serve.set_result(None)
