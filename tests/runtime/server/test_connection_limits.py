"""How many connections an API process takes, by what it is told and what the system lets it have."""

import resource

import pytest

from kvasir_runtime.server.connections import ConnectionLimits
from kvasir_runtime.server.launch import SPARE_DESCRIPTORS, _connection_limits


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (resource.RLIM_INFINITY, ConnectionLimits(4096, 2048)),
        (4096 + SPARE_DESCRIPTORS, ConnectionLimits(4096, 2048)),
        (2000 + SPARE_DESCRIPTORS, ConnectionLimits(2000, 1000)),
        (SPARE_DESCRIPTORS, ConnectionLimits(1, 1)),
    ],
)
def test_fewer_descriptors_leave_one_peer_no_more_than_half(
    descriptors: int, expected: ConnectionLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert _connection_limits(4096, 2048) == expected


def test_a_limit_a_peer_that_was_asked_for_is_kept_where_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert _connection_limits(100, 100) == ConnectionLimits(100, 100)
