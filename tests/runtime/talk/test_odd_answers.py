"""Answers that are not as a format has it: nothing raises, nothing is lost, and pieces do not matter."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.talk.answers import ANSWERS, TOOLS, Answer, joined, parser_of, read

from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from kvasir_runtime.talk.formats import FORMATS, REASONING
from kvasir_runtime.talk.parser import AnswerParser

BY_NAME = {answer.name: answer for answer in ANSWERS}


def pieces_of(answer: Answer) -> list[str]:
    """Marks, words and brackets."""
    return sorted({piece for piece in re.findall(r"<[^<>]*>|\[\w+\]|\w+|\s+|.", answer.text) if piece})


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_text_is_read_the_same_in_all_pieces(answer: Answer, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(answer.text)))
    pieces = data.draw(st.lists(st.sampled_from(pieces_of(answer)), max_size=15))
    text = answer.text[:begin] + "".join(pieces)
    whole = read(answer, [text])
    assert read(answer, text) == whole
    assert read(answer, [answer.text[:begin], *pieces]) == whole
    if not any(isinstance(event, CallBegun | Reasoning) for event in whole) and answer.reasoning is None:
        assert "".join(event.text for event in whole if isinstance(event, Content)) == text


ODD: list[tuple[str, str | None, str | None, str, list[Event]]] = [
    (
        "broken arguments",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call>Bye',
        [CallBegun(0, "weather", None), Arguments(0, '{"city": Oslo}'), CallEnded(0), Content("Bye")],
    ),
    (
        "a bracket too many, and one too few",
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {}}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {}</tool_call>',
        [
            CallBegun(0, "weather", None),
            Arguments(0, "{}"),
            CallEnded(0),
            CallBegun(1, "weather", None),
            Arguments(1, "{}"),
            CallEnded(1),
        ],
    ),
    (
        "an unknown tool",
        "hermes",
        None,
        'So <tool_call>{"name": "sea", "arguments": {}}</tool_call>',
        [Content('So <tool_call>{"name": "sea", "arguments": {}}</tool_call>')],
    ),
    (
        "a mark that is none",
        "hermes",
        None,
        'I use <tool_call> like <tool_call>{"name": "weather_now"}',
        [Content("I use <tool_call> like"), CallBegun(0, "weather_now", None), Arguments(0, "{}"), CallEnded(0)],
    ),
    (
        "an unknown tool among others",
        "pythonic",
        None,
        "[weather_now(), sea()]",
        [CallBegun(0, "weather_now", None), Arguments(0, "{}"), CallEnded(0), Content(", sea()]")],
    ),
    ("a call without brackets", "pythonic", None, "weather_now() says so", [Content("weather_now() says so")]),
    ("a header without arguments", "gemma4", None, "<|tool_call>call:weather[1]", [
        Content("<|tool_call>call:weather[1]"),
    ]),
    ("an answer in brackets", "pythonic", None, "[1] says so", [Content("[1] says so")]),
    ("an expression", "pythonic", None, "[weather(city=a + b)]", [
        CallBegun(0, "weather", None), Arguments(0, '{"city": a + b)]'),
    ]),
    ("an answer in JSON that has a tool's name", "llama3_json", None, '{"name": "weather", "id": 3}', [
        Content('{"name": "weather", "id": 3}'),
    ]),
    ("an answer in JSON", "llama3_json", None, '{"name": "Oslo"}', [Content('{"name": "Oslo"}')]),
    ("parameters not closed", "qwen3_coder", None, "<function=weather>\n<parameter=city>\nOslo\n</parameter>", [
        CallBegun(0, "weather", None), Arguments(0, '{"city": "Oslo"}'), CallEnded(0),
    ]),
    (
        "values that are not of their types",
        "qwen3_coder",
        None,
        "<function=weather><parameter=days>soon</parameter><parameter=hours>[1, x]</parameter>"
        "<parameter=exact>1</parameter><parameter=wind>1.5</parameter><parameter=note>null</parameter>"
        "<parameter=place>{'a': 'b\"', \"c\": \"\\u00e5\"}</parameter><parameter=else>1</parameter></function>",
        [
            CallBegun(0, "weather", None),
            Arguments(
                0,
                '{"days": "soon", "hours": [1, x], "exact": true, "wind": 1.5, "note": null, '
                '"place": {"a": "b\\"", "c": "\\u00e5"}, "else": "1"}',
            ),
            CallEnded(0),
        ],
    ),
    ("a thought without an end", "hermes", "qwen3", "<think>\nHm <tool_call>\n", [Reasoning("Hm <tool_call>\n")]),
    ("two thoughts, then a mark in text", None, "qwen3", "<think>\na</think>\n<think>b</think>\n\nc</think> <think>d", [
        Reasoning("ab"), Content("c</think> <think>d"),
    ]),
    ("no formats", None, None, "\n<think>a</think> <tool_call> ", [Content("\n<think>a</think> <tool_call> ")]),
    ("plain text where channels are expected", "openai", "openai_gptoss", "Hm <|ok|>", [Content("Hm <|ok|>")]),
    ("an unknown tool on a channel", "openai", "openai_gptoss",
        "<|channel|>analysis to=functions.sea<|message|>{}<|call|>",
        [Reasoning("to=functions.sea {}")],
    ),
    ("a call on a channel where nothing may be called", None, "openai_gptoss",
        '<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather '
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [Reasoning("Hm"), Content('to=functions.weather {"city": "Oslo"}')],
    ),
    ("a header without a message", "openai", "openai_gptoss",
        "<|channel|>final Well<|end|><|channel|>final<|message|>So",
        [Content(" Well\nSo")],
    ),
    ("marks in a message", "openai", "openai_gptoss",
        "<|channel|>final<|message|>It <|constrain|>is<|message|> 1.<|channel|>final<|message|>Yes<|return|>",
        [Content("It is 1.\nYes")],
    ),
    ("a channel named twice", "openai", "openai_gptoss",
        "<|channel|>analysis<|start|>assistant<|channel|>final<|message|>Yes", [Content("Yes")],
    ),
    ("text that begins as a header", "openai", "openai_gptoss", "to=be or not", [Content("to=be or not")]),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "reasoning", "text", "expected"), [odd[1:] for odd in ODD], ids=[o[0] for o in ODD])
def test_an_odd_answer(calls: str | None, reasoning: str | None, text: str, expected: list[Event]) -> None:
    answer = Answer("odd", calls, text, [], reasoning)
    assert read(answer, [text]) == expected
    assert read(answer, text) == expected


def test_a_cut_call_has_no_end_and_what_was_held_of_it() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</para"
    assert read(Answer("cut", "qwen3_coder", text, []), text, is_cut=True) == [
        CallBegun(0, "weather", None),
        Arguments(0, '{"city": "Oslo\\n</para'),
    ]


def test_a_header_that_is_cut_shows_nothing() -> None:
    """Marks come whole, since they are tokens."""
    thought = "<|channel|>analysis<|message|>Hm<|end|>"
    header = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    for length in range(len(header) + 1):
        if header[:length].count("<") == header[:length].count(">"):
            answer = Answer("cut", "openai", thought + header[:length], [], "openai_gptoss")
            events = read(answer, answer.text, is_cut=True)
            assert events[:1] == [Reasoning("Hm")]
            assert events[1:] in ([], [CallBegun(0, "weather", None)])


def test_a_thought_whose_mark_the_prompt_has_may_repeat_it() -> None:
    answer = Answer("repeated", None, "\n<think>\nHm</think>Yes", [], "qwen3", is_thinking=True)
    assert read(answer, answer.text) == [Reasoning("Hm"), Content("Yes")]


def test_arguments_and_text_are_told_as_soon_as_they_can_be() -> None:
    parser = parser_of(BY_NAME["hermes"])
    assert parser.feed("He asks") == [Reasoning("He asks")]
    assert parser.feed(".</think>It") == [Reasoning("."), Content("It")]
    assert parser.feed('<tool_call>\n{"name": "weather"') == [CallBegun(0, "weather", None)]
    assert parser.feed(', "arguments": {"city": "Os') == [Arguments(0, '{"city": "Os')]
    assert parser.feed("lo") == [Arguments(0, "lo")]
    assert parser.feed('"}}') == [Arguments(0, '"}'), CallEnded(0)]


def test_parameters_are_told_as_soon_as_their_type_shows() -> None:
    parser = parser_of(BY_NAME["qwen3_coder"])
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert parser.feed("Os") == [Arguments(0, "Os")]
    parser.feed("lo\n</parameter>\n<parameter=note>\nnul")
    assert parser.feed("ls and") == [Arguments(0, '"nulls and')]
    parser.feed("\n</parameter>\n<parameter=hours>\n")
    assert parser.feed("[1, 2") == [Arguments(0, "[1, ")]


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = parser_of(BY_NAME["llama3_json"])
    assert parser.feed('{"city": "Os') == [Content('{"city": "Os')]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder: marks left out, and marks in a value", "pythonic", "gemma4"])
def test_deep_nesting_is_read(name: str) -> None:
    begun = {
        "hermes": '</think><tool_call>{"name": "weather", "arguments": {"hours": ',
        "qwen3_coder: marks left out, and marks in a value": "<function=weather><parameter=hours>",
        "pythonic": "[weather(hours=",
        "gemma4": "<|tool_call>call:weather{hours:",
    }[name]
    events = read(BY_NAME[name], [begun + "[" * 20_000], is_cut=True)
    assert events[-1].text.endswith("[" * 20_000)  # type: ignore[union-attr]
    assert joined(events) == events


def test_what_a_grammar_held_is_read_to_the_letter() -> None:
    text = (
        "Not <tool_call><function=weather_now></function></tool_call> yet.</think><tool_call><function=weather>"
        "<parameter=city>\n</parameter></function><parameter=days>\n1\n</parameter></function></tool_call>"
    )
    parser = AnswerParser(FORMATS["qwen3_coder"], REASONING["qwen3"], tools=TOOLS, is_thinking=True, is_held=True)
    events = [event for char in text for event in parser.feed(char)]
    assert joined([*events, *parser.finish(is_cut=False)]) == [
        Reasoning("Not <tool_call><function=weather_now></function></tool_call> yet."),
        CallBegun(0, "weather", None),
        Arguments(0, '{"city": "</parameter></function><parameter=days>\\n1"}'),
        CallEnded(0),
    ]
