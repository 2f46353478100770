"""How many connections an API process takes, by what it is told and what the system lets it have."""

import resource

import pytest

from kvasir_runtime.server.connections import SPARE_DESCRIPTORS, ConnectionLimits


@pytest.mark.parametrize(
    ("descriptors", "expected"),
    [
        (resource.RLIM_INFINITY, ConnectionLimits(4096, 2048)),
        (4096 + SPARE_DESCRIPTORS, ConnectionLimits(4096, 2048)),
        (4095 + SPARE_DESCRIPTORS, ConnectionLimits(4095, 2047)),
        (2000 + SPARE_DESCRIPTORS, ConnectionLimits(2000, 1000)),
        (SPARE_DESCRIPTORS, ConnectionLimits(1, 1)),
    ],
)
def test_fewer_descriptors_leave_one_peer_no_more_than_half(descriptors: int, expected: ConnectionLimits) -> None:
    assert ConnectionLimits(4096, 2048).within(descriptors) == expected


def test_a_limit_a_peer_that_was_asked_for_is_kept_where_all_are_taken() -> None:
    assert ConnectionLimits(100, 100).within(1 << 20) == ConnectionLimits(100, 100)
