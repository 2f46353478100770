"""The watch over the ranks ends the group also when it fails itself, and says which node never came."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.parallel.counts import CollectiveCounts
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks, RankLinks, ipc_addresses
from kvasir_runtime.ranks.liveness import RankLiveness
from kvasir_runtime.ranks.messages import FromRank, RankCame, RankFailed, RankProgress
from kvasir_runtime.ranks.rendezvous import Rendezvous
from kvasir_runtime.ranks.watch import RankWatch

PLACE = "10.0.0.1:29500"


class BrokenLinks(CoreLinks):
    def receive(self, timeout_seconds: float, wakers: object = ()) -> list[FromRank]:
        raise ValueError("what came is no message")


class RecordedLiveness(RankLiveness):
    """What it is told of work."""

    def __init__(self) -> None:
        super().__init__(2, 60)
        self.work = SimpleQueue[tuple[int, bool]]()

    def sent(self, num_steps: int, awaits_results: bool = False) -> None:
        self.work.put((num_steps, awaits_results))


class Hopeless(Rendezvous):
    """Gives up at once."""

    def problem(self) -> str | None:
        return self.missing()


def watch_over(
    links: CoreLinks, topology: Topology, judge: RankLiveness | None = None, meeting: Rendezvous | None = None
) -> RankWatch:
    """With a step under way."""
    failures = SimpleQueue[RankFailedError]()
    meeting = meeting or Rendezvous(topology, PLACE, warning_seconds=0.0)
    executor = RankExecutor(links)
    executor.num_steps = 1
    executor.sample()
    judge = judge or RankLiveness(topology.num_ranks, 60, topology.tensor_size)
    return RankWatch(links, executor, {}, meeting, judge, lambda counts: None, failures.put)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[CoreLinks]:
    links = CoreLinks(ipc_addresses(tmp_path, 2))
    yield links
    links.close()


def test_a_watch_that_fails_says_so_and_is_not_waited_for(tmp_path: Path) -> None:
    links = BrokenLinks(ipc_addresses(tmp_path, 1))
    watch = watch_over(links, Topology())
    with pytest.raises(RankFailedError, match="the watch over the ranks failed: ValueError: what came is no message"):
        watch.descriptions.result(timeout=10)
    watch.close()
    links.close()


def test_a_node_that_never_came_is_named_and_not_the_one_that_waited(
    links: CoreLinks, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_over(links, Topology(pipeline_size=2, num_nodes=2))
    rank = RankLinks(links.bound, 0)
    rank.send(RankCame(0))
    rank.send(RankFailed(0, "rank 0 could not meet the others of its group of 2", is_consequence=True))
    with pytest.raises(RankFailedError, match=r"node 1 \(ranks 1\) did not come; check .* 10\.0\.0\.1:29500"):
        watch.descriptions.result(timeout=10)
    assert "node 1 (ranks 1) did not come" in caplog.text, "long before the end"
    watch.close()
    rank.close()


def test_hope_that_ends_ends_the_group(links: CoreLinks) -> None:
    topology = Topology(pipeline_size=2, num_nodes=2)
    watch = watch_over(links, topology, meeting=Hopeless(topology, PLACE))
    with pytest.raises(RankFailedError, match="did not come"):
        watch.descriptions.result(timeout=10)
    watch.close()


def test_a_rank_that_the_other_waits_for_ends_the_group(links: CoreLinks) -> None:
    judge = RankLiveness(2, stall_seconds=0, tensor_size=2, awaited_seconds=0.0)
    watch = watch_over(links, Topology(tensor_size=2), judge)
    ranks = [RankLinks(links.bound, rank) for rank in range(2)]
    for number, num_collectives in enumerate((7, 0)):
        ranks[number].send(RankProgress(number, 0, num_collectives, {"tensor": CollectiveCounts([9], [0])}))
    with pytest.raises(RankFailedError, match="rank 1 has been awaited by its tensor group"):
        watch.descriptions.result(timeout=10)
    watch.close()
    for rank in ranks:
        rank.close()


def test_a_result_that_has_not_come_is_work(links: CoreLinks) -> None:
    judge = RecordedLiveness()
    watch = watch_over(links, Topology(tensor_size=2), judge)
    assert judge.work.get(timeout=10) == (1, True)
    watch.close()
