"""Ranks meet over what they can; one that has gone is not blamed on those that notice."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.runtime.exactness.rank_threads import meet_all

from kvasir_runtime.errors import CollectiveFailedError, ConfigurationError
from kvasir_runtime.parallel.meeting_point import LOOPBACK
from kvasir_runtime.parallel.topology import Topology

TWO = Topology(tensor_size=2)


@pytest.mark.parametrize("host", [LOOPBACK, "::1"])
def test_ranks_reduce_over_addresses_of_either_family(tmp_path: Path, host: str) -> None:
    groups = meet_all(TWO, tmp_path, host=host)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda rank, value: rank.least(value), groups, [5, 3])) == [3, 3]


def test_a_rank_that_ended_before_the_least_was_known_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    groups = meet_all(TWO, tmp_path)
    groups.pop()
    with pytest.raises(CollectiveFailedError, match="mostly since another rank has ended"):
        groups[0].least(3)


def test_nccl_is_refused_on_cpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nccl needs GPUs; use gloo or shared_memory on CPUs"):
        meet_all(TWO, tmp_path, "nccl")
