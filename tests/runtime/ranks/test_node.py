"""A node's verdict over its ranks' processes."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from kvasir_runtime.parallel.topology import RankPlace, Topology
from kvasir_runtime.ranks.node import NodeServer
from kvasir_runtime.ranks.status import NodeStatus


class EndingProcess:
    """Its sentinel is closed, its status is known to who waits for it, as between two steps of the kernel's exit."""

    def __init__(self, exit_code: int) -> None:
        self.sentinel, write_end = os.pipe()
        os.close(write_end)
        self.exitcode: int | None = None
        self._exit_code = exit_code

    def join(self) -> None:
        self.exitcode = self._exit_code


def test_a_rank_whose_status_comes_after_its_end_is_still_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process, place = EndingProcess(exit_code=9), RankPlace(Topology(pipeline_size=2, num_nodes=2), 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status = NodeStatus(tmp_path / "ranks", [place])
        node = NodeServer({place: process}, status, listener, shutdown_timeout=1)
        assert asyncio.run(node.run()) == 1
    assert "rank 1 ended without a word, with status 9" in caplog.text
    os.close(process.sentinel)
