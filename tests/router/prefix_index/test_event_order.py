"""Gaps, replays, duplicates and restarts, as decisions over numbered messages."""

from kvasir_router.prefix_index.event_order import Action, Apply, EventOrder, Lost, Replay, Reset


def message(number: int, process: str = "first") -> bytes:
    return f"{process} {number}".encode()


def replay(order: EventOrder, numbers: range, process: str = "first") -> list[Action]:
    """A whole answer."""
    actions: list[Action] = []
    for number in numbers:
        actions += order.replayed(number, message(number, process))
    return actions + order.replay_ended()


def synced(num_messages: int) -> EventOrder:
    order = EventOrder()
    order.resync()
    replay(order, range(num_messages))
    return order


def applied(actions: list[Action]) -> list[bytes]:
    return [action.payload for action in actions if isinstance(action, Apply)]


def test_at_the_start_everything_is_asked_for() -> None:
    assert EventOrder().resync() == [Reset(is_complete=False), Replay(0)]


def test_a_history_from_its_beginning_is_complete() -> None:
    order = EventOrder()
    order.resync()
    assert replay(order, range(2)) == [Reset(is_complete=True), Apply(message(0)), Apply(message(1))]


def test_a_history_whose_beginning_is_forgotten_is_not() -> None:
    order = EventOrder()
    order.resync()
    assert replay(order, range(7, 8)) == [Reset(is_complete=False), Apply(message(7))]


def test_an_engine_that_has_sent_nothing_is_known_completely() -> None:
    order = EventOrder()
    order.resync()
    assert order.replay_ended() == [Reset(is_complete=True)]
    assert order.receive(0, message(0)) == [Apply(message(0))]


def test_messages_in_order_are_applied() -> None:
    order = synced(3)
    assert order.receive(3, message(3)) == [Apply(message(3))]


def test_a_live_message_waits_for_the_replay_and_is_not_applied_twice() -> None:
    order = EventOrder()
    order.resync()
    assert order.receive(1, message(1)) == order.receive(2, message(2)) == []
    assert applied(replay(order, range(2))) == [message(0), message(1), message(2)]


def test_a_gap_is_asked_for_from_the_last_message_seen() -> None:
    order = synced(3)
    assert order.receive(5, message(5)) == [Replay(2)]
    assert replay(order, range(2, 6)) == [Apply(message(3)), Apply(message(4)), Apply(message(5))]
    assert order.num_gaps == 1


def test_messages_that_the_replay_does_not_bring_are_lost() -> None:
    order = synced(3)
    order.receive(5, message(5))
    assert replay(order, range(5, 6)) == [Lost(), Apply(message(5))]


def test_messages_that_no_replay_brings_are_lost_once() -> None:
    order = synced(3)
    order.receive(5, message(5))
    assert order.replay_failed() == [Lost(), Apply(message(5))]
    assert order.receive(6, message(6)) == [Apply(message(6))]


def test_a_replay_that_ends_before_the_gap_does_is_not_asked_for_again() -> None:
    order = synced(3)
    order.receive(5, message(5))
    assert replay(order, range(2, 4)) == [Apply(message(3)), Lost(), Apply(message(5))]


def test_a_message_that_comes_twice_is_applied_once() -> None:
    order = synced(3)
    assert order.receive(1, message(1)) == []


def test_another_message_of_an_old_number_is_another_process() -> None:
    order = synced(3)
    assert order.receive(0, message(0, "second")) == [Reset(is_complete=False), Replay(0)]
    assert applied(replay(order, range(2), "second")) == [message(0, "second"), message(1, "second")]


def test_a_restart_that_looks_like_a_gap_is_seen_by_the_last_message() -> None:
    order = synced(3)
    order.receive(5, message(5, "second"))
    assert order.replayed(2, message(2, "second")) == [Reset(is_complete=False), Replay(0)]


def test_a_replay_that_begins_with_another_first_message_is_the_history_of_another_process() -> None:
    order = synced(1)
    assert order.verify() == [Replay(0)]
    assert replay(order, range(2), "second") == [
        Reset(is_complete=True), Apply(message(0, "second")), Apply(message(1, "second")),
    ]  # fmt: skip


def test_a_restarted_engine_that_has_sent_less_is_seen_too() -> None:
    order = synced(3)
    assert order.verify() == [Replay(2)]
    assert order.replay_ended() == [Reset(is_complete=False), Replay(0)]
    assert order.replay_ended() == [Reset(is_complete=True)]


def test_a_look_that_finds_nothing_changes_nothing() -> None:
    order = synced(3)
    order.verify()
    assert replay(order, range(2, 3)) == []


def test_a_look_at_an_engine_that_has_sent_nothing_changes_nothing() -> None:
    order = EventOrder()
    order.resync()
    order.replay_ended()
    order.verify()
    assert order.replay_ended() == []


def test_a_look_brings_what_was_missed_last() -> None:
    order = synced(3)
    order.verify()
    assert replay(order, range(2, 5)) == [Apply(message(3)), Apply(message(4))]


def test_without_a_replay_socket_what_comes_is_taken_as_it_comes() -> None:
    order = EventOrder()
    order.resync()
    assert order.replay_failed() == []
    assert order.receive(7, message(7)) == [Reset(is_complete=False), Apply(message(7))]
    assert order.receive(8, message(8)) == [Apply(message(8))]


def test_a_replay_that_succeeds_later_tells_the_history_after_all() -> None:
    order = EventOrder()
    order.resync()
    order.replay_failed()
    order.receive(1, message(1))
    assert order.verify() == [Replay(0)]
    assert replay(order, range(2)) == [Reset(is_complete=True), Apply(message(0)), Apply(message(1))]


def test_a_look_that_gets_no_answer_loses_nothing() -> None:
    order = synced(3)
    order.verify()
    assert order.replay_failed() == []


def test_a_look_after_a_broken_connection_that_gets_no_answer_is_a_loss_once() -> None:
    order = synced(3)
    order.disconnected()
    order.verify()
    assert order.replay_failed() == [Lost()]
    order.verify()
    assert order.replay_failed() == []


def test_what_has_waited_since_before_the_connection_broke_is_doubted() -> None:
    order = EventOrder()
    order.resync()
    assert order.receive(0, b"of a process that is gone") == []
    order.disconnected()
    order.verify()
    assert order.replay_failed() == [Reset(is_complete=True), Apply(b"of a process that is gone"), Lost()]
    assert order.receive(1, b"next") == [Apply(b"next")]


def test_what_has_waited_since_before_the_connection_broke_is_looked_at_again_once_somebody_answers() -> None:
    """The next process has sent nothing yet, so that the message looks like its first."""
    order = EventOrder()
    order.resync()
    order.receive(0, message(0, "gone"))
    order.disconnected()
    order.verify()
    assert order.replay_ended() == [Reset(is_complete=True), Apply(message(0, "gone")), Replay(0)]
    assert order.replay_ended() == [Reset(is_complete=False), Replay(0)]
    assert order.replay_ended() == [Reset(is_complete=True)]


def test_a_look_that_is_due_during_a_replay_follows_it() -> None:
    order = EventOrder()
    order.resync()
    assert order.verify() == []
    assert replay(order, range(2))[-1] == Replay(1)


def test_an_engine_that_keeps_nothing_is_followed_from_its_latest() -> None:
    order = EventOrder()
    order.resync()
    order.receive(7, message(7))
    assert order.replay_ended() == [Reset(is_complete=False), Apply(message(7))]


def test_a_restart_during_a_replay_is_found_after_it() -> None:
    order = synced(3)
    order.verify()
    order.receive(1, message(1, "second"))
    assert replay(order, range(2, 3)) == [Reset(is_complete=False), Replay(0)]
    assert applied(replay(order, range(2), "second")) == [message(0, "second"), message(1, "second")]


def test_what_waits_is_bounded_and_what_is_dropped_is_lost() -> None:
    order = EventOrder(max_pending=2)
    order.resync()
    for number in range(4):
        order.receive(number, message(number))
    assert replay(order, range(1)) == [
        Reset(is_complete=True), Apply(message(0)), Lost(), Apply(message(2)), Apply(message(3)),
    ]  # fmt: skip


def test_a_long_replay_does_not_make_its_live_messages_look_old() -> None:
    order = EventOrder(max_recent=2)
    order.resync()
    order.receive(0, message(0))
    assert replay(order, range(5)) == [Reset(is_complete=True), *(Apply(message(number)) for number in range(5))]


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    order = synced(3)
    assert order.replayed(3, message(3)) == order.replay_ended() == order.replay_failed() == []


def test_a_replay_that_has_forgotten_the_last_message_seen_may_be_another_processs() -> None:
    order = synced(3)
    order.verify()
    assert replay(order, range(3, 5)) == [Lost(), Apply(message(3)), Apply(message(4))]


def test_a_message_of_a_process_that_is_gone_does_not_resync_for_ever() -> None:
    order = EventOrder()
    order.resync()
    order.receive(0, message(0, "gone"))
    order.receive(0, message(0))
    assert replay(order, range(1))[-2:] == [Reset(is_complete=False), Replay(0)]
    assert replay(order, range(1)) == [Reset(is_complete=True), Apply(message(0))]


def test_a_replay_by_a_process_that_is_gone_is_asked_for_again_at_once() -> None:
    order = synced(3)
    order.verify()
    order.disconnected()
    assert order.verify() == [Replay(2)]
    assert order.verify() == []
