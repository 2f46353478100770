"""What a rank says that cannot even meet the others, and when it ends without a word of theirs."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import NoReturn

import pytest

from kvasir_runtime.config import ModelConfig, RuntimeConfig
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.parallel.topology import RankPlace, Topology
from kvasir_runtime.ranks.evidence import CORE_GONE_STATUS
from kvasir_runtime.ranks.links import CoreLinks, LinkAddresses, ipc_addresses, network_addresses
from kvasir_runtime.ranks.messages import RankFailed
from kvasir_runtime.ranks.rank_main import run_rank
from kvasir_runtime.ranks.rank_process import RankArguments


def refuse(*_: object) -> NoReturn:
    raise RankFailedError("node 0 cannot be reached at 10.0.0.1:29500")


@pytest.fixture
def core(tmp_path: Path) -> Iterator[CoreLinks]:
    links = CoreLinks(ipc_addresses(tmp_path, 1))
    yield links
    links.close()


def arguments(folder: Path, addresses: LinkAddresses | None) -> RankArguments:
    config, place = RuntimeConfig(model=ModelConfig(model="m")), RankPlace(Topology(), 0)
    return RankArguments(config, place, addresses, MeetingPoint(folder / "meeting"), None, folder / "status", 0)


def run(folder: Path, addresses: LinkAddresses | None) -> None:
    """A rank that finds nobody."""
    with pytest.raises(SystemExit) as end:
        run_rank(arguments(folder, addresses), refuse, sys.exit)
    assert end.value.code == 1


def test_the_core_and_the_log_hear_why(core: CoreLinks, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, core.bound)
    deadline, heard = time.monotonic() + 20, core.receive(10)
    while not heard and time.monotonic() < deadline:  # that the rank has gone may be known before its last word
        heard = core.receive(10)
    assert heard == [RankFailed(0, "node 0 cannot be reached at 10.0.0.1:29500", is_consequence=False)]
    assert "rank 0 failed: node 0 cannot be reached" in capfd.readouterr().err


def test_where_the_core_is_not_known_the_log_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, None)
    logged = capfd.readouterr().err
    assert "rank 0 failed: node 0 cannot be reached" in logged
    assert "Traceback" not in logged


def test_it_ends_with_the_core_while_it_waits_for_another_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    core = CoreLinks(network_addresses("127.0.0.1", 1))
    waits, may_go_on, statuses = Event(), Event(), SimpleQueue[int]()

    def wait_for_others(*_: object) -> NoReturn:
        waits.set()
        may_go_on.wait()
        raise RankFailedError("nobody came")

    with ThreadPoolExecutor() as pool:
        end = pool.submit(run_rank, arguments(tmp_path, core.bound), wait_for_others, statuses.put)
        assert waits.wait(30)
        core.close()
        try:
            assert statuses.get(timeout=30) == CORE_GONE_STATUS
            logged = capfd.readouterr().err
            assert "ERROR" not in logged, "a group that is stopped shows no error"
            assert "WARNING" not in logged
        finally:
            may_go_on.set()
        end.result(30)
