"""When a key is due, and which of several goes first."""

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.queue.schedule import KeySchedule

A, B = ServiceKey("models", "a"), ServiceKey("models", "b")


def schedule(spacing_seconds: float = 0.0) -> KeySchedule:
    return KeySchedule(BackOff(first_seconds=1.0, longest_seconds=5.0), spacing_seconds)


def test_a_key_added_many_times_is_handed_out_once() -> None:
    keys = schedule()
    for _ in range(3):
        keys.add(A, 0.0)
    assert [keys.take(0.0), keys.take(0.0)] == [A, None]


def test_the_key_that_is_due_longest_goes_first() -> None:
    keys = schedule()
    keys.add(A, 2.0)
    keys.add(B, 1.0)
    assert [keys.take(3.0), keys.take(3.0)] == [B, A]


def test_an_urgent_key_goes_before_those_that_wait_longer_once() -> None:
    keys = schedule()
    keys.add(A, 1.0)
    keys.add(B, 2.0, is_urgent=True)
    assert [keys.take(3.0), keys.take(3.0)] == [B, A]
    for key in (A, B):
        keys.finish(key, 3.0)
    keys.add(A, 4.0)
    keys.add(B, 5.0)
    assert keys.take(6.0) == A


def test_an_urgent_key_is_there_from_when_it_is_due_until_its_pass_has_ended() -> None:
    keys = schedule()
    keys.add(A, 0.0)
    keys.add(B, 2.0, is_urgent=True)
    assert [keys.has_urgent(1.0, besides=A), keys.has_urgent(2.0, besides=A)] == [False, True]
    assert keys.take(2.0) == B
    assert [keys.has_urgent(2.0, besides=A), keys.has_urgent(2.0, besides=B)] == [True, False]
    keys.finish(B, 2.0)
    assert not keys.has_urgent(2.0, besides=A)


def test_an_urgent_key_whose_pass_runs_does_not_hold_itself_up() -> None:
    keys = schedule()
    keys.add(B, 2.0, is_urgent=True)
    assert keys.take(2.0) == B
    keys.add(B, 2.0, is_urgent=True)
    assert not keys.has_urgent(2.0, besides=B)


def test_a_pass_that_no_change_of_a_spec_wanted_holds_up_nothing() -> None:
    keys = schedule()
    keys.add(A, 0.0)
    assert keys.take(0.0) == A
    assert not keys.has_urgent(0.0, besides=B)


def test_a_key_that_is_debounced_waits_for_the_last_wish_of_its_kind() -> None:
    keys = schedule()
    for due in (2.0, 3.0, 2.5):
        keys.debounce(A, due, latest=6.0)
    assert [keys.take(2.9), keys.take(3.0)] == [None, A]


def test_a_key_that_is_debounced_again_and_again_is_handed_out_all_the_same() -> None:
    keys = schedule()
    for due in (2.0, 5.0, 8.0):
        keys.debounce(A, due, latest=due + 4.0)
    assert keys.next_start() == 6.0
    assert [keys.take(5.9), keys.take(6.0)] == [None, A]


def test_a_key_that_is_debounced_is_handed_out_for_another_wish_before_and_then_no_more() -> None:
    keys = schedule()
    keys.add(A, 30.0)
    keys.debounce(A, 2.0, latest=6.0)
    keys.add(A, 1.0)
    keys.debounce(A, 3.0, latest=6.0)
    assert (keys.take(1.0), keys.next_start()) == (A, None)


def test_a_delayed_key_is_not_handed_out_early_and_an_event_overtakes_the_delay() -> None:
    keys = schedule()
    keys.add(A, 10.0)
    assert keys.take(9.9) is None
    keys.add(A, 5.0)
    keys.add(A, 20.0)
    assert keys.take(5.0) == A


def test_a_key_is_never_handed_out_twice_at_once_but_once_more_afterwards() -> None:
    keys = schedule()
    keys.add(A, 0.0)
    assert keys.take(0.0) == A
    keys.add(A, 0.0)
    assert keys.take(0.0) is None
    keys.finish(A, 1.0)
    assert keys.take(1.0) == A


def test_failures_in_a_row_double_the_wait_up_to_a_bound_and_success_forgets_them() -> None:
    keys, now, delays = schedule(), 0.0, []
    keys.add(A, now)
    for _ in range(5):
        assert keys.take(now) == A
        delays.append(keys.fail(A, now))
        assert keys.take(now + delays[-1] - 0.01) is None
        now += delays[-1]
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert keys.take(now) == A
    keys.finish(A, now)
    keys.add(A, now)
    assert keys.take(now) == A
    assert keys.fail(A, now) == 1.0


def test_one_failing_key_does_not_slow_another() -> None:
    keys = schedule()
    keys.add(A, 0.0)
    keys.take(0.0)
    keys.fail(A, 0.0)
    keys.add(B, 0.0)
    assert keys.take(0.0) == B


def test_a_burst_of_events_after_a_pass_becomes_one_pass() -> None:
    keys = schedule(spacing_seconds=0.5)
    keys.add(A, 0.0)
    keys.take(0.0)
    keys.finish(A, 1.0)
    for moment in (1.0, 1.1, 1.2):
        keys.add(A, moment)
    assert [keys.take(1.4), keys.take(1.5), keys.take(1.5)] == [None, A, None]


def test_a_forgotten_key_leaves_nothing_behind() -> None:
    keys = schedule(spacing_seconds=5.0)
    keys.add(A, 0.0)
    keys.take(0.0)
    assert keys.fail(A, 0.0) == 1.0
    keys.forget(A)
    assert keys.take(1.0) == A
    assert keys.fail(A, 1.0) == 1.0


def test_the_longest_wait_counts_waiting_keys_and_running_passes() -> None:
    keys = schedule()
    assert keys.longest_wait_seconds(9.0) == 0.0
    keys.add(A, 1.0)
    assert keys.longest_wait_seconds(9.0) == 8.0
    keys.take(4.0)
    assert keys.longest_wait_seconds(9.0) == 5.0
    assert keys.num_due(9.0) == 0
