"""Tensor ranks of a simulated engine: each has its own KV and its own reads, and is asked over real sockets by the real
rank_connectors.py and rank_transfers.py. Their threads make no two runs alike."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tests.runtime.scheduling.fake_rank import FakeRank

from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.scheduling.step import StepPlan, StepResult
from kvasir_runtime.transfer.connector import Connector
from kvasir_runtime.transfer.rank_connectors import RankConnectors
from kvasir_runtime.transfer.rank_transfers import RankTransfers


class TensorRanks:
    """They all compute the same."""

    def __init__(self, ranks: Sequence[FakeRank]) -> None:
        self._ranks = ranks

    def run(self, plan: StepPlan) -> StepResult:
        first, *others = [rank.run(plan) for rank in self._ranks]
        assert all(np.array_equal(other.token_ids, first.token_ids) for other in others), "ranks draw different tokens"
        return first


class AskedRanks:
    """The ranks' own connectors, each on a thread, behind one."""

    def __init__(self, parts: Sequence[Connector]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvasir-")
        self._links = CoreLinks(ipc_addresses(Path(self._folder.name), len(parts)))
        self._failures: list[Exception] = []
        for part, address in zip(parts, self._links.bound.transfers, strict=True):
            RankTransfers(part, address, self._failures.append).start()
        self.connector = RankConnectors(self._links.transfers)

    def end(self) -> None:
        assert not self._failures, self._failures
        for socket in self._links.transfers:
            socket.send(b"this is no message, and so the thread's last")
        deadline = time.monotonic() + 20
        while len(self._failures) < len(self._links.transfers):
            assert time.monotonic() < deadline, "a rank's transfer thread hangs"
            time.sleep(0.001)
        self._links.close()
        self._folder.cleanup()
