import pytest

from kvasir_router.service.slow_start import SLOW_START_SECONDS, max_in_flight


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
    assert max_in_flight(seconds_ready, elsewhere) == limit
