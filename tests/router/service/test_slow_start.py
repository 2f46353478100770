import pytest

from kvasir_router.service.in_flight_limits import SLOW_START_SECONDS, newcomers_limit


@pytest.mark.parametrize(
    ("seconds_ready", "elsewhere", "limit"),
    [
        (0.0, [20, 40], 1),
        (5.0, [20, 40], 16),
        (9.9, [20, 40], 30),
        (SLOW_START_SECONDS, [20, 40], None),
        (-1.0, [20, 40], 1),
        (5.0, [0, 0], 1),
        (0.0, [], None),  # all are new
    ],
)
def test_a_newcomer_takes_a_growing_part_of_what_the_others_have(
    seconds_ready: float, elsewhere: list[int], limit: int | None
) -> None:
    assert newcomers_limit(seconds_ready, elsewhere) == limit
