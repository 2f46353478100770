"""Engines' parts in exchanging KV, by NIXL within the test's process."""

import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from kvasir_runtime.engine.kv_transfers import KvTransfers
from kvasir_runtime.execution.worker import Worker
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.ranks.rank_main import rank_transfers
from kvasir_runtime.scheduling.scheduler import Scheduler
from kvasir_runtime.transfer.agent import TransferAgent
from kvasir_runtime.transfer.commands import Place
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.handshake import identity
from kvasir_runtime.transfer.nixl import NixlConnector
from kvasir_runtime.transfer.page_layout import PageParts, TensorPlace
from kvasir_runtime.transfer.params import KvTransferParams
from kvasir_runtime.transfer.rank_connectors import RankConnectors
from kvasir_runtime.transfer.side_channel import SideChannel


class Transfers:
    """Gives engines their part in exchanging KV, and ends it."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._places: list[Place] = []
        self.fails_requests = True
        self.make_connector: Callable[[str, Tensor, PageParts], NixlConnector] = NixlConnector

    def __call__(self, worker: Worker, scheduler: Scheduler, wake: threading.Event) -> KvTransfers:
        return self.of_ranks([worker], Topology(), scheduler, wake)

    def of_ranks(
        self, workers: list[Worker], topology: Topology, scheduler: Scheduler, wake: threading.Event
    ) -> KvTransfers:
        channel = SideChannel("127.0.0.1", 0)
        self._stack.callback(channel.close)
        engine_id, tensor_size = f"engine-{1 + len(self._places)}", topology.tensor_size
        stages = [worker.description for worker in workers[::tensor_size]]
        place = Place(engine_id=engine_id, host="127.0.0.1", port=channel.port, tensor_size=tensor_size)
        agent = TransferAgent(
            self._connector(engine_id, workers, topology),
            channel,
            identity("model", "", stages[0].layout, [stage.kv_specs for stage in stages], tensor_size),
            place,
            page_bytes=sum(stage.layout.page_bytes for stage in stages) * tensor_size,
            lease_seconds=30,
            timeout_seconds=30,
            checksums=True,
            wake_core=wake.set,
        )
        agent.start()
        self._places.append(place)
        self._stack.callback(agent.close)
        return KvTransfers(scheduler, agent, place, page_bytes=agent.page_bytes, fails_requests=self.fails_requests)

    def _connector(self, engine_id: str, workers: list[Worker], topology: Topology) -> Connector:
        """Over links, as the ranks' processes are reached, where there are several."""
        if len(workers) == 1:
            rank = workers[0].description
            parts = PageParts(rank.kv_specs, rank.layout, TensorPlace(0, 1))
            return self.make_connector(engine_id, workers[0].runner.kv_buffer, parts)
        folder = self._folder / engine_id
        folder.mkdir()
        links = CoreLinks(ipc_addresses(folder, len(workers)))
        self._stack.callback(links.close)
        for place, worker, address in zip(topology.places(), workers, links.bound.transfers, strict=True):
            rank_transfers(worker, place, address, self._fail, make_connector=self.make_connector).start()
        return RankConnectors(links.transfers)

    def from_first(self, key: str) -> KvTransferParams:
        """To decode what the engine made first computes."""
        place = self._places[0]
        return KvTransferParams(do_remote_prefill=True, remote_host=place.host, remote_port=place.port, transfer_id=key)

    @staticmethod
    def _fail(error: Exception) -> None:
        traceback.print_exception(error)
