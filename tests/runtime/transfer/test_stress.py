"""Hundreds of requests, with aborts, kills and failures at every stage; stress.py runs as many as one likes."""

import pytest
from tests.runtime.transfer.simulation import FULL
from tests.runtime.transfer.stress import Stress
from tests.runtime.transfer.test_transfer import WINDOWS

from kvasir_runtime.kv_cache.spec import KvGroup


@pytest.mark.parametrize(("checksums", "groups"), [(True, FULL), (False, FULL), (True, WINDOWS)])
def test_nothing_is_stranded_and_no_token_is_wrong(checksums: bool, groups: tuple[KvGroup, ...]) -> None:
    stress = Stress(5, 300, checksums=checksums, groups=groups)
    stress.run()
    assert stress.outcomes["answered"] > 150
    assert sum(stress.outcomes.values()) == 300
    expected = {"read", "withdrawn", "unreachable"} | ({"checksum"} if checksums else set())
    assert expected <= set(stress.failures), stress.failures


def test_nothing_is_stranded_where_several_ranks_read() -> None:
    """By way of their real sockets and threads."""
    stress = Stress(7, 60, num_ranks=2)
    stress.run()
    assert sum(stress.outcomes.values()) == 60
    assert stress.outcomes["answered"] > 20


def test_nothing_is_stranded_at_any_data_parallel_rank() -> None:
    stress = Stress(11, 300, num_data_ranks=2)
    stress.run()
    assert sum(stress.outcomes.values()) == 300
    assert stress.outcomes["answered"] > 150
