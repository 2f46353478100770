"""Who is silent, and who is stuck."""

import pytest

from kvasir_runtime.heartbeat import SILENT_SECONDS
from kvasir_runtime.ranks.liveness import MOST_AT_ONCE, RankLiveness

STALL_SECONDS = 20.0


@pytest.fixture
def liveness() -> RankLiveness:
    """Two ranks that have begun, and a step handed to them."""
    liveness = RankLiveness(2, STALL_SECONDS)
    for rank in range(2):
        liveness.hear(rank, num_steps=0, num_collectives=0)
    liveness.sent(1)
    return liveness


def wait(liveness: RankLiveness, seconds: float, heard: dict[int, tuple[int, int]]) -> None:
    """Second by second; `heard`: steps and collectives that ranks say they have done."""
    for _ in range(int(seconds)):
        for rank, (num_steps, num_collectives) in heard.items():
            liveness.hear(rank, num_steps, num_collectives)
        liveness.pass_time(1.0)


def test_a_silent_rank_is_named_with_everybodys_progress(liveness: RankLiveness) -> None:
    liveness.hear(0, 0, 3)
    wait(liveness, SILENT_SECONDS, {0: (0, 3)})
    assert liveness.problem() is None
    wait(liveness, 1, {0: (0, 3)})
    assert liveness.problem() == (
        "rank 1 has given no sign of life for 6 seconds "
        "(1 steps begun; rank 0: 0 steps, 3 collectives; rank 1: 0 steps, 0 collectives)"
    )


def test_a_rank_that_has_not_begun_may_load_for_long() -> None:
    liveness = RankLiveness(2, STALL_SECONDS)
    wait(liveness, 1000, {0: (0, 0)})
    assert liveness.problem() is None


def test_silence_counts_only_while_somebody_listens(liveness: RankLiveness) -> None:
    liveness.pass_time(1000.0)
    assert liveness.problem() is None
    assert MOST_AT_ONCE < SILENT_SECONDS


def test_living_ranks_that_do_nothing_have_stalled(liveness: RankLiveness) -> None:
    alive = {0: (0, 3), 1: (1, 3)}
    wait(liveness, STALL_SECONDS, alive)
    assert liveness.problem() is None
    wait(liveness, 1, alive)
    assert str(liveness.problem()).startswith("no rank has made progress for 21 seconds")


def test_a_long_step_makes_progress_by_its_collectives(liveness: RankLiveness) -> None:
    for number in range(10):
        wait(liveness, STALL_SECONDS / 2, {0: (0, number), 1: (0, number)})
    assert liveness.problem() is None


def test_nothing_stalls_where_nothing_is_to_be_done(liveness: RankLiveness) -> None:
    wait(liveness, 10 * STALL_SECONDS, {0: (1, 3), 1: (1, 3)})
    assert liveness.problem() is None
