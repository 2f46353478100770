"""Telling a stream's events from the lines of its journal, however the bytes are cut."""

import time
from itertools import pairwise

import pytest

from kvasir_router.errors import BodyBudgetExceededError
from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.journal import Journal, JournalBounds

STREAM = (
    b': kvasir {"id":1}\n\n'
    b': kvasir [0]\ndata: {"text":"a"}\n\n'
    b": kvasir [1]\n\n"
    b': kvasir [2]\ndata: {"text":": kvasir "}\n\n'
    b"data: [DONE]\n\n"
)
EVENTS = b'data: {"text":"a"}\n\ndata: {"text":": kvasir "}\n\ndata: [DONE]\n\n'
LINES = b'{"id":1}\n[0]\n[1]\n[2]\n'


def a_journal(max_bytes: int = 2**30, **bounds: int) -> Journal:
    return Journal(BodyBudget(max_bytes), JournalBounds(**bounds))


def fed(journal: Journal, *chunks: bytes) -> bytes:
    """The events of chunks that are all relayed."""
    relayed = b""
    for chunk in chunks:
        events, lines = journal.split(chunk)
        relayed += events
        journal.keep(lines)
    return relayed


@pytest.mark.parametrize("size", [1, 2, 7, 40, 1000])
def test_events_and_lines_come_apart_in_chunks_of_any_size(size: int) -> None:
    journal = a_journal()
    starts = [*range(0, len(STREAM), size), len(STREAM)]
    assert fed(journal, *(STREAM[start:end] for start, end in pairwise(starts))) == EVENTS
    assert journal.lines == LINES


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_a_cut_anywhere_leaves_as_many_lines_as_events(cut: int) -> None:
    journal = a_journal()
    relayed = fed(journal, STREAM[:cut])
    blocks = STREAM[:cut].split(b"\n\n")[:-1]
    assert relayed.count(b"data: {") == sum(b"data: {" in block for block in blocks)
    assert journal.lines.count(b"\n") == sum(block[:8] == b": kvasir" for block in blocks)


def test_lines_count_only_once_they_are_kept() -> None:
    journal = a_journal()
    _, lines = journal.split(b": kvasir [0]\ndata: x\n\n")
    assert (lines, journal.num_bytes) == (b"[0]\n", 0)


def test_half_an_event_is_forgotten_when_another_engine_goes_on() -> None:
    journal = a_journal()
    fed(journal, b": kvasir [0]\ndata: a\n\n: kvasir [1]\ndata: b")
    journal.drop_unfinished_block()
    assert fed(journal, b": kvasir [1]\ndata: b\n\n") == b"data: b\n\n"
    assert journal.lines == b"[0]\n[1]\n"


def test_only_the_line_of_a_move_says_that_the_kv_comes_along() -> None:
    journal = a_journal()
    assert not journal.is_moved
    fed(journal, b': kvasir {"id":1,"seeds":[7]}\n\n')
    assert not journal.is_moved
    fed(journal, b": kvasir [0,[5],null,0]\ndata: a\n\n")
    assert not journal.is_moved
    fed(journal, b': kvasir [0,[],null,0,{"remote_host":"h"}]\n\n')
    assert journal.is_moved
    fed(journal, b": kvasir [0,[6],null,0]\ndata: b\n\n")
    assert not journal.is_moved, "it is with the next engine now"


def test_a_large_event_in_many_pieces_is_read_once() -> None:
    """A prompt's log probabilities are one event of many MiB: 0.03 s, against 15 s when each piece is joined."""
    journal, start = a_journal(), time.process_time()
    event = b"data: " + b"x" * 2**23 + b"\n\n"
    assert fed(journal, b": kvasir [0]\n", *(event[at : at + 2**11] for at in range(0, len(event), 2**11))) == event
    assert (journal.lines, time.process_time() - start < 2) == (b"[0]\n", True)


def test_a_journal_beyond_its_bound_is_given_up() -> None:
    journal = Journal(BodyBudget(2**30), JournalBounds(max_bytes=10))
    journal.keep(b"[0]\n[1]\n")
    journal.keep(b"3\n")
    assert (journal.is_given_up, journal.num_bytes) == (False, 10)
    journal.keep(b"\n")
    journal.keep(b"[3]\n")
    assert (journal.is_given_up, journal.lines) == (True, b"")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_block_is_held_up_to_its_bound_and_beyond_is_passed_on(size: int) -> None:
    comment, event = b": kvasir [1]\n", b"data: " + b"x" * 21
    journal = a_journal(max_block_bytes=40)
    assert fed(journal, b": kvasir [0]\ndata: a\n\n" + comment, event) == b"data: a\n\n"
    assert (journal.is_given_up, journal.lines) == (False, b"[0]\n")
    assert fed(journal, b"y") == event + b"y"
    assert (journal.is_given_up, journal.lines) == (True, b"")
    rest = b"z" * 50 + b"\n\n: kvasir [2]\ndata: b\n\n: kvasir"
    pieces = [rest[at : at + size] for at in range(0, len(rest), size)]
    assert fed(journal, *pieces) == b"z" * 50 + b"\n\ndata: b\n\n"
    assert journal.lines == b""


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("size", [40 - len(b": kvasir "), 100])
def test_of_a_comment_beyond_the_bound_nothing_is_passed_on(end: bytes, size: int) -> None:
    budget = BodyBudget(2**30)
    journal = Journal(budget, JournalBounds(max_block_bytes=40))
    assert fed(journal, b": kvasir ", *[b"x"] * size, end or b"x") == b""
    assert (journal.is_given_up, budget.num_bytes <= 40) == (True, True)
    assert fed(journal, b"" if end else b"\n", b"data: a\n\n", b"data: b\n\n") == b"data: a\n\ndata: b\n\n"


def test_a_block_that_never_ends_is_not_held() -> None:
    budget = BodyBudget(2**30)
    journal = Journal(budget, JournalBounds(max_block_bytes=40))
    assert fed(journal, b"data: ", *[b"x\n"] * 1000) == b"data: " + b"x\n" * 1000
    assert budget.num_bytes == 0


def test_what_is_kept_counts_in_the_budget_until_it_is_dropped() -> None:
    budget = BodyBudget(100)
    journal = Journal(budget)
    assert fed(journal, b": kvasir [0]\ndata: a\n\n: kvasir [1]\nda") == b"data: a\n\n"
    assert budget.num_bytes == len(b"[0]\n" + b": kvasir [1]\nda")
    journal.drop_unfinished_block()
    assert budget.num_bytes == len(b"[0]\n")
    for _ in range(2):
        journal.drop()
        assert (budget.num_bytes, journal.is_given_up) == (0, True)


def test_a_journal_that_the_budget_has_no_room_for_is_given_up() -> None:
    budget = BodyBudget(16)
    budget.take(2)
    journal = Journal(budget)
    journal.keep(b"[0]\n[1]\n")
    assert (journal.is_given_up, budget.num_bytes) == (False, 10)
    journal.keep(b"\n")
    assert (journal.is_given_up, journal.lines, budget.num_bytes) == (True, b"", 2)
    journal.keep(b"[3]\n")
    assert (journal.lines, budget.num_bytes) == (b"", 2)


def test_a_burst_of_bodies_does_not_end_a_small_journal() -> None:
    budget = BodyBudget(32)
    budget.take(32)
    journal = Journal(budget)
    journal.keep(b"[0]\n")
    assert (journal.is_given_up, budget.num_bytes) == (False, 36)
    journal.keep(b"\n")
    assert (journal.is_given_up, budget.num_bytes) == (True, 32)


def test_journals_leave_half_of_the_budget_and_their_own_part_to_bodies() -> None:
    budget = BodyBudget(32)
    first, second = Journal(budget), Journal(budget)
    first.keep(b"x" * 8)
    second.keep(b"x" * 8)
    budget.take(20)
    with pytest.raises(BodyBudgetExceededError):
        budget.take(1)
    second.keep(b"x")
    assert (first.is_given_up, second.is_given_up, budget.num_bytes) == (False, True, 28)
    budget.take(8)
    for journal in (first, second):
        journal.drop()
    budget.take(-28)
    assert budget.num_bytes == 0


@pytest.mark.parametrize("size", [1, 3, 9, 1000])
def test_a_block_that_the_budget_has_no_room_for_is_passed_on_without_its_comment(size: int) -> None:
    journal = a_journal(0)
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert b"".join(fed(journal, piece) for piece in pieces) == EVENTS
    assert journal.lines == b""


def test_a_block_is_held_as_far_as_the_budget_has_room() -> None:
    budget = BodyBudget(40)
    journal = Journal(budget)
    assert fed(journal, b"data: " + b"x" * 14) == b""
    assert (budget.num_bytes, journal.is_given_up) == (20, False)
    assert fed(journal, b"y") == b"data: " + b"x" * 14 + b"y"
    assert (budget.num_bytes, journal.is_given_up) == (0, True)
    assert fed(journal, b"z\n\ndata: b\n\n") == b"z\n\ndata: b\n\n"
