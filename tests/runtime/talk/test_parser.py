"""Answers as they come, in pieces of any size: what is read of them."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.talk.answers import ANSWERS, Answer, joined, parser_of, read

from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

every_answer = pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)


@every_answer
def test_an_answer_is_read_as_it_was_meant(answer: Answer) -> None:
    assert read(answer, [answer.text]) == answer.events()
    assert read(answer, answer.text) == answer.events()
    for event in answer.events():
        if isinstance(event, Arguments):
            assert isinstance(json.loads(event.text), dict)


@every_answer
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_pieces_come_to_the_whole(answer: Answer, data: st.DataObject) -> None:
    ends = data.draw(st.sets(st.integers(0, len(answer.text)), max_size=12))
    cuts = [0, *sorted(ends), len(answer.text)]
    assert read(answer, [answer.text[begin:end] for begin, end in pairwise(cuts)]) == answer.events()


@every_answer
def test_what_is_told_of_the_beginning_of_an_answer_stays_true(answer: Answer) -> None:
    parser, told = parser_of(answer), list[Event]()
    for char in answer.text:
        told += parser.feed(char)
        assert is_beginning(joined(told), answer.events())


@every_answer
def test_an_answer_may_be_cut_anywhere(answer: Answer) -> None:
    for length in range(len(answer.text)):
        parser = parser_of(answer)
        told = parser.feed(answer.text[:length])
        events = [*told, *parser.finish()]
        num_begun = sum(isinstance(event, CallBegun) for event in events)
        num_ended = sum(isinstance(event, CallEnded) for event in events)
        assert num_begun - 1 <= num_ended <= num_begun
        assert is_beginning(joined(told), joined(events))


def is_beginning(told: list[Event], whole: list[Event]) -> bool:
    if not told:
        return True
    *before, last = told
    if before != whole[: len(before)] or len(before) >= len(whole):
        return False
    expected = whole[len(before)]
    if isinstance(last, Content | Reasoning | Arguments) and type(last) is type(expected):
        return expected.text.startswith(last.text)  # type: ignore[union-attr]
    return last == expected
