"""The watch over the ranks ends the group also when it fails itself."""

from pathlib import Path
from queue import SimpleQueue

import pytest

from kvasir_runtime.errors import RankFailedError
from kvasir_runtime.ranks.executor import RankExecutor
from kvasir_runtime.ranks.links import CoreLinks, ipc_addresses
from kvasir_runtime.ranks.messages import FromRank
from kvasir_runtime.ranks.watch import RankWatch


class BrokenLinks(CoreLinks):
    def receive(self, timeout_seconds: float, wakers: object = ()) -> list[FromRank]:
        raise ValueError("what came is no message")


def test_a_watch_that_fails_says_so_and_is_not_waited_for(tmp_path: Path) -> None:
    links, failures = BrokenLinks(ipc_addresses(tmp_path, 1)), SimpleQueue[RankFailedError]()
    watch = RankWatch(links, RankExecutor(links), {}, 1, 60, lambda counts: None, failures.put)
    with pytest.raises(RankFailedError, match="the watch over the ranks failed: ValueError: what came is no message"):
        watch.descriptions.result(timeout=10)
    watch.close()
    links.close()
