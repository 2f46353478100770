"""Who is silent, and who is stuck."""

import pytest

from kvasir_runtime.heartbeat import SILENT_SECONDS
from kvasir_runtime.ranks.liveness import AWAITED_SECONDS, MOST_AT_ONCE, RankLiveness

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


def test_what_a_device_still_computes_is_to_be_done(liveness: RankLiveness) -> None:
    liveness.sent(1, awaits_results=True)
    wait(liveness, STALL_SECONDS + 1, {0: (1, 3), 1: (1, 3)})
    assert str(liveness.problem()).startswith("no rank has made progress for 21 seconds")


@pytest.fixture
def pairs() -> RankLiveness:
    """Two stages of two tensor ranks, with two steps handed to them."""
    pairs = RankLiveness(4, 3 * AWAITED_SECONDS, tensor_size=2)
    pairs.sent(2)
    return pairs


@pytest.mark.parametrize("work", [(1, 6), (2, 5)], ids=["wait in a collective", "are done"])
def test_a_rank_that_all_others_of_its_tensor_group_wait_for_is_named(
    work: tuple[int, int], pairs: RankLiveness
) -> None:
    seen = {0: (2, 9), 1: (2, 9), 2: work, 3: (1, 5)}
    wait(pairs, 1, seen)  # which was progress
    wait(pairs, AWAITED_SECONDS - 1, seen)
    assert pairs.problem() is None
    wait(pairs, 1, seen)
    assert str(pairs.problem()).startswith(
        "rank 3 has been awaited by its tensor group for 21 seconds (2 steps begun; "
    )


def test_a_group_that_may_stand_still_for_longer_may_wait_for_a_third_of_it() -> None:
    patient = RankLiveness(2, 6 * AWAITED_SECONDS, tensor_size=2)
    patient.sent(1)
    wait(patient, 2 * AWAITED_SECONDS, {0: (0, 4), 1: (0, 3)})
    assert patient.problem() is None
    wait(patient, 1, {0: (0, 4), 1: (0, 3)})
    assert str(patient.problem()).startswith("rank 1 has been awaited by its tensor group for 41 seconds")


@pytest.mark.parametrize(
    "seen",
    [
        {0: (2, 9), 1: (2, 9), 2: (1, 6), 3: (1, 6)},  # in the same collective, or in none
        {0: (2, 9), 1: (2, 8), 2: (1, 6), 3: (1, 6)},  # done: it need not come to another
        {0: (1, 9), 1: (1, 9), 2: (0, 1), 3: (0, 1)},  # another stage takes its time
    ],
)
def test_nobody_is_awaited(pairs: RankLiveness, seen: dict[int, tuple[int, int]]) -> None:
    wait(pairs, 2 * AWAITED_SECONDS, seen)
    assert pairs.problem() is None


def test_a_rank_that_is_behind_but_goes_on_is_not_awaited(pairs: RankLiveness) -> None:
    for number in range(10):
        wait(pairs, AWAITED_SECONDS / 2, {2: (0, number + 1), 3: (0, number)})
    assert pairs.problem() is None


def test_where_ranks_wait_for_each_other_in_turn_nobody_is_named() -> None:
    trio = RankLiveness(3, 3 * AWAITED_SECONDS, tensor_size=3)
    trio.sent(1)
    wait(trio, 2 * AWAITED_SECONDS, {0: (0, 4), 1: (0, 4), 2: (0, 5)})
    assert trio.problem() is None
