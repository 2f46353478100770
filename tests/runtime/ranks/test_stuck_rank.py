"""A rank's process that lives, beats and computes nothing, while the other waits for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
from benchmarks.scheduled_steps import drive, rank_config, scheduler_of

from kvasir_runtime.config import ParallelConfig
from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.parallel.meeting_point import MeetingPoint
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.ranks.liveness import RankLiveness
from kvasir_runtime.ranks.rank_process import running_ranks
from kvasir_runtime.ranks.rendezvous import Rendezvous
from kvasir_runtime.ranks.start import topology_of
from kvasir_runtime.ranks.watch import RankWatch

MODEL = Path("examples/models/kvasir-python-700k")


class HalfCutLinks(CoreLinks):
    @contextmanager
    def cut(self) -> Iterator[None]:
        """Rank 1 hears of no step meanwhile."""
        whole, self._pushes = self._pushes, self._pushes[:1]
        yield
        self._pushes = whole


@pytest.mark.slow  # quick ones in test_watch and test_liveness decide over what ranks say; here it is they who say it
def test_it_is_named_while_its_process_runs_on(tmp_path: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2)
    config, topology = rank_config(str(MODEL), 2, parallel), topology_of(parallel, 0)
    links, failures = HalfCutLinks(ipc_addresses(tmp_path, 2)), SimpleQueue[RankFailedError]()
    point = MeetingPoint(tmp_path / "meeting")
    with running_ranks(config, topology.places(node=0), links.bound, point, tmp_path / "status") as processes:
        executor = RankExecutor(links)
        judge = RankLiveness(2, stall_seconds=6, tensor_size=2, awaited_seconds=2.0)
        watch = RankWatch(
            links, executor, processes, Rendezvous(topology, ""), judge, lambda counts: None, failures.put
        )
        scheduler = scheduler_of(2, 1, watch.descriptions.result(240)[0])
        drive(executor, scheduler, 1, until=8)
        with links.cut():
            plan = scheduler.schedule()
            assert plan is not None
            executor.forward(plan)
            executor.sample()
        assert "rank 1 has been awaited by its tensor group" in str(failures.get(timeout=240))
        watch.close()
    links.close()
