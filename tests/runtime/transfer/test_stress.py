"""Hundreds of requests, with aborts, kills and failures at every stage; stress.py runs as many as one likes."""

import pytest
from tests.runtime.transfer.stress import Stress


@pytest.mark.parametrize("checksums", [True, False])
def test_nothing_is_stranded_and_no_token_is_wrong(checksums: bool) -> None:
    stress = Stress(5, 300, checksums=checksums)
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
