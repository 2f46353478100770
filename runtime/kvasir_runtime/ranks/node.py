"""A node that is not the first: it runs its ranks, of one engine or several, and answers probes on a port of its own.

It ends when a rank ends or falls silent, and a rank ends when its engine core has gone. Told to stop, it goes on until
node 0 has drained: the requests in flight there need these ranks.
"""

import asyncio
import logging
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from kvasir_runtime.config import RuntimeConfig
from kvasir_runtime.heartbeat import BEAT_SECONDS
from kvasir_runtime.metrics import Families, build_info
from kvasir_runtime.parallel.topology import RankPlace
from kvasir_runtime.ranks.evidence import how_it_ended
from kvasir_runtime.ranks.rank_process import running_ranks
from kvasir_runtime.ranks.start import meeting_point_of, topology_of
from kvasir_runtime.ranks.status import NodeStatus
from kvasir_runtime.server.launch import listen

logger = logging.getLogger(__name__)


def serve_node(config: RuntimeConfig) -> int:
    """Exit status: 0 after a stop, 1 when a rank or node 0 failed."""
    parallel = config.parallel
    topologies = [topology_of(parallel, data_rank) for data_rank in range(parallel.data_parallel_size)]
    with (
        listen(config.server.host, config.server.port) as listener,
        tempfile.TemporaryDirectory(prefix="kvasir-") as folder,
        ExitStack() as engines,
    ):
        file, processes = Path(folder) / "ranks", dict[RankPlace, BaseProcess]()
        for topology in topologies:
            places, meeting_point = topology.places(parallel.node_rank), meeting_point_of(parallel, topology.data_rank)
            own = engines.enter_context(running_ranks(config, places, None, meeting_point, file))
            processes |= {place: own[place.rank] for place in places}
        status = NodeStatus(file, list(processes))
        return asyncio.run(NodeServer(processes, status, listener, config.server.shutdown_timeout).run())


@dataclass
class NodeServer:
    """To be run on one event loop."""

    processes: Mapping[RankPlace, BaseProcess]
    status: NodeStatus
    listener: socket.socket
    shutdown_timeout: float
    _has_to_stop: asyncio.Event = field(default_factory=asyncio.Event)
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Until a rank fails, or for as long as a stop may take. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._has_to_stop.set)
        for process in self.processes.values():
            loop.add_reader(process.sentinel, self._has_ended.set)
        config = uvicorn.Config(
            probe_app(self.status),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        probes = asyncio.create_task(server._serve([self.listener]))  # without signal handlers of its own
        try:
            failure = await self._watch()
        finally:
            server.should_exit = True
            await probes
        if failure is None or self._has_to_stop.is_set():
            return 0
        logger.error("%s", failure)
        return 1

    async def _watch(self) -> str | None:
        """What has failed; None when the time to stop is over."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        while not self._has_ended.is_set():
            if deadline is None and self._has_to_stop.is_set():
                # Before its ranks have loaded nobody can need them.
                deadline = loop.time() + (self.shutdown_timeout if self.status.is_ready else 0.0)
            if deadline is not None and loop.time() > deadline:
                return None
            if (problem := self.status.silent_rank()) is not None:
                return problem
            try:
                await asyncio.wait_for(self._has_ended.wait(), BEAT_SECONDS)
            except TimeoutError:
                continue
        ended = wait([process.sentinel for process in self.processes.values()], timeout=0)
        place, process = next(each for each in self.processes.items() if each[1].sentinel in ended)
        process.join()  # its sentinel closes a moment before the kernel tells its status
        assert process.exitcode is not None
        return how_it_ended(place.name, process.exitcode)


def probe_app(status: NodeStatus) -> FastAPI:
    """A node that runs is healthy: it ends with its first rank that fails."""
    app = FastAPI(title="Kvasir node", docs_url=None, redoc_url=None, openapi_url=None)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(status))
    ProcessCollector(registry=registry)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        return Response() if status.is_ready else Response("ranks are still loading", status_code=503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


class NodeCollector(Collector):
    def __init__(self, status: NodeStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield build_info()
        of_node = Families("kvasir_", {})
        yield of_node.gauge("node_ready", "1 where all ranks of this node have loaded, else 0.", self._status.is_ready)
        steps = {
            (str(place.topology.data_rank), str(place.rank)): number
            for place, number in zip(self._status.places, self._status.num_steps, strict=True)
        }
        text = "Steps that a rank of this node computed."
        yield of_node.counter("rank_steps", text, steps, "data_parallel_rank", "rank")
