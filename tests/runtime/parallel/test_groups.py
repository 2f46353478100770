"""A rank that has gone is not blamed on those that notice."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import FileStore, ProcessGroup

from kvasir_runtime.errors import CollectiveFailedError
from kvasir_runtime.parallel.groups import _gloo, _least
from kvasir_runtime.parallel.meeting_point import LOOPBACK


def joined(folder: Path, host: str = LOOPBACK) -> list[ProcessGroup]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: _gloo(FileStore(str(folder / "meeting"), 2), rank, 2, host), range(2)))


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_ranks_reduce_over_addresses_of_either_family(tmp_path: Path, host: str) -> None:
    groups = joined(tmp_path, host)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_least, groups, [5, 3])) == [3, 3]


def test_a_rank_that_ended_before_the_least_was_known_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    groups = joined(tmp_path)
    groups.pop()
    with pytest.raises(CollectiveFailedError, match="mostly since another rank has ended"):
        _least(groups[0], 3)
