"""Which stream is handed over, and where to: at the limits of each condition."""

from dataclasses import replace

import pytest

from kvasir_router.placement.rebalancing import (
    HANDOVER_SECONDS,
    LEAST_REMAINING_TOKENS,
    MOVE_CRITERIA,
    PREEMPTED_STEPS,
    RECEIVER_USAGE,
    STILL_SATURATED_USAGE,
    EngineView,
    Move,
    StreamView,
    choose,
    is_saturated,
)

FULL = EngineView("full", "1", 3, 950, 1000, 10.0, saturated_seconds=MOVE_CRITERIA.saturated_seconds)
IDLE = EngineView("idle", "1", 0, 0, 1000, 0.0)
STREAM = StreamView(7, "full", num_prompt_tokens=50, num_drawn_tokens=100)
MOVE = Move(7, "full", "idle")


def chosen(
    full: EngineView = FULL, idle: EngineView = IDLE, stream: StreamView = STREAM, transfer: float = 0.0
) -> Move | None:
    return choose([full, idle], [stream], lambda source, receiver, num_tokens: transfer)


@pytest.mark.parametrize(
    ("used", "num_waiting", "was_saturated", "expected"),
    [
        (900, 1, False, True),
        (899, 1, False, False),
        (1000, 0, False, False),
        (700, 1, True, True),
        (699, 1, True, False),
        (1000, 0, True, False),
    ],
)
def test_an_engine_is_saturated_whose_kv_is_full_while_requests_wait(
    used: int, num_waiting: int, was_saturated: bool, expected: bool
) -> None:
    assert is_saturated(used, 1000, num_waiting, was_saturated=was_saturated) is expected


def test_a_stream_of_an_overfull_engine_goes_to_an_idle_one() -> None:
    assert chosen() == MOVE


def test_nothing_goes_anywhere_without_engines_or_streams() -> None:
    assert choose([], [STREAM], lambda *_: 0.0) is None
    assert choose([FULL, IDLE], [], lambda *_: 0.0) is None
    assert choose([FULL], [STREAM], lambda *_: 0.0) is None


def test_an_engine_must_have_been_saturated_for_some_seconds() -> None:
    assert chosen(full=replace(FULL, saturated_seconds=MOVE_CRITERIA.saturated_seconds - 0.01)) is None


@pytest.mark.parametrize("change", [{"revision": "2"}, {"can_receive": False}, {"num_waiting": 1}], ids=str)
def test_who_cannot_receive_gets_nothing(change: dict) -> None:
    assert chosen(idle=replace(IDLE, **change)) is None


def test_the_receiver_stays_half_empty_to_the_streams_expected_end() -> None:
    most = RECEIVER_USAGE * IDLE.kv_capacity_tokens - STREAM.num_kv_tokens - STREAM.num_remaining_tokens
    assert chosen(idle=replace(IDLE, kv_used_tokens=most)) == MOVE
    assert chosen(idle=replace(IDLE, kv_used_tokens=most + 1)) is None


def test_what_was_moved_does_not_move_back_at_once() -> None:
    """A receiver at its limit is far from being a source, and a stream rests."""
    assert RECEIVER_USAGE < STILL_SATURATED_USAGE
    assert chosen(stream=replace(STREAM, rested_seconds=MOVE_CRITERIA.rest_seconds)) == MOVE
    assert chosen(stream=replace(STREAM, rested_seconds=MOVE_CRITERIA.rest_seconds - 0.01)) is None


@pytest.mark.parametrize(
    ("num_drawn", "most", "num_remaining"),
    [(100, None, 100), (100, 1000, 100), (100, 150, 50), (100, 100, 0), (0, None, 0)],
)
def test_as_many_tokens_again_are_expected_within_the_clients_bound(
    num_drawn: int, most: int | None, num_remaining: int
) -> None:
    stream = StreamView(7, "full", 50, num_drawn, most)
    assert stream.num_remaining_tokens == num_remaining


def test_a_stream_close_to_its_end_stays() -> None:
    most = STREAM.num_drawn_tokens + LEAST_REMAINING_TOKENS
    assert chosen(stream=replace(STREAM, max_output_tokens=most)) == MOVE
    assert chosen(stream=replace(STREAM, max_output_tokens=most - 1)) is None


def test_a_stream_that_gets_no_token_was_preempted_and_stays() -> None:
    limit = PREEMPTED_STEPS / FULL.steps_per_second
    assert chosen(stream=replace(STREAM, silent_seconds=limit - 0.01)) == MOVE
    assert chosen(stream=replace(STREAM, silent_seconds=limit)) is None


def test_a_move_must_win_many_times_the_seconds_that_it_takes() -> None:
    longest = STREAM.num_remaining_tokens / FULL.steps_per_second / MOVE_CRITERIA.gain - HANDOVER_SECONDS
    assert chosen(transfer=longest - 0.001) == MOVE
    assert chosen(transfer=longest + 0.001) is None


def test_what_an_engine_that_makes_no_step_would_win_is_not_known() -> None:
    assert chosen(full=replace(FULL, steps_per_second=0.0)) is None


def test_the_stream_that_frees_the_most_kv_for_the_longest_goes_first() -> None:
    long, longer = replace(STREAM, number=1), replace(STREAM, number=2, num_drawn_tokens=150)
    ending = replace(STREAM, number=3, num_prompt_tokens=100, max_output_tokens=170)
    move = choose([FULL, IDLE], [long, longer, ending], lambda *_: 0.0)
    assert move is not None
    assert move.number == 2


def test_a_stream_too_large_for_the_receiver_makes_way_for_one_that_fits() -> None:
    large = replace(STREAM, number=8, num_prompt_tokens=500)
    assert choose([FULL, IDLE], [large, STREAM], lambda *_: 0.0) == MOVE


def test_streams_of_others_stay() -> None:
    assert chosen(stream=replace(STREAM, url="idle")) is None


def test_who_has_the_most_waiting_is_helped_first_and_by_the_emptiest() -> None:
    fuller, emptier = replace(FULL, url="fuller", num_waiting=9), replace(IDLE, url="emptier")
    engines = [FULL, replace(IDLE, kv_used_tokens=10), fuller, emptier]
    streams = [STREAM, replace(STREAM, number=8, url="fuller")]
    assert choose(engines, streams, lambda *_: 0.0) == Move(8, "fuller", "emptier")


def test_where_the_emptiest_is_too_far_the_next_is_taken() -> None:
    engines = [FULL, IDLE, replace(IDLE, url="near", kv_used_tokens=10)]
    move = choose(engines, [STREAM], lambda _, receiver, __: 100.0 if receiver == "idle" else 0.0)
    assert move == Move(7, "full", "near")


def test_one_overfull_engine_is_no_help_to_another() -> None:
    assert chosen(idle=replace(FULL, url="idle")) is None
