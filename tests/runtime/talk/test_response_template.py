"""Formats that checkpoints describe themselves."""

from typing import Any

import pytest
from tests.runtime.talk.answers import ANSWERS, TOOLS, Answer, Call, joined

from kvasir_runtime.talk.events import Content, Reasoning
from kvasir_runtime.talk.parser import AnswerParser
from kvasir_runtime.talk.response_template import calls_of, reasoning_of

BY_NAME = {answer.name: answer for answer in ANSWERS}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
    "qwen3_coder": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": NAMED,
        },
    },
    "gemma4": {
        "thinking": {"open": ["<|channel>thought\n"], "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": NAMED,
        },
    },
}
TEMPLATES["qwen3_coder: the call's mark alone closes it"] = {
    **TEMPLATES["qwen3_coder"],
    "tool_calls": {
        name: value for name, value in TEMPLATES["qwen3_coder"]["tool_calls"].items() if name != "close_pattern"
    }
    | {"close": "</tool_call>"},
}


GEMMA4 = Answer(
    "gemma4",
    "gemma4",
    '<|channel>thought\nHm\n<channel|>Well<|tool_call>call:weather{city:<|"|>"{Oslo}"<|"|>,days:3}<tool_call|>',
    [Reasoning("Hm"), Content("Well"), Call("weather", '{"city":"\\"{Oslo}\\"","days":3}')],
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_description_of_a_checkpoint_reads_its_answers(name: str) -> None:
    answer = GEMMA4 if name == "gemma4" else BY_NAME[name.split(":")[0]]
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": TEMPLATES[name]}
    calls, reasoning = calls_of(template), reasoning_of(template)
    parser = AnswerParser(calls, reasoning, tools=TOOLS, is_thinking=answer.is_thinking)
    events = [event for char in answer.text for event in parser.feed(char)]
    assert joined([*events, *parser.finish(is_cut=False)]) == answer.events()


@pytest.mark.parametrize(
    "calls",
    [
        {"open_pattern": r"<(a|b)>(?P<name>\w+)", "close": "</a>", "content": "json", "transform": NAMED},
        {"open_pattern": r"to=(?P<name>\w+).*?<\|message\|>", "close": "<|call|>", "content": "json"},
        {"open": "<call>", "close": "</call>", "content": "kv-lines"},
        {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": {"name": "{content.n}"}}},
        {"open_pattern": r"<f=(?P<name>\w+)>", "content": "xml-inline", "content_args": {}, "transform": NAMED},
        [],
        {"open_pattern": 3, "close": "</a>", "content": "json", "transform": NAMED},
        {"open_pattern": r"<(?P<name>a)>", "content": "json", "content_args": {"string_delims": 3}, "transform": NAMED},
    ],
)
def test_what_is_said_in_other_terms_is_not_read(calls: Any) -> None:
    assert calls_of({"fields": {"tool_calls": calls}}) is None


@pytest.mark.parametrize("template", [None, {}, {"fields": []}, {"version": 2, "fields": {"thinking": {}}}])
def test_what_is_no_description_says_nothing(template: Any) -> None:
    assert calls_of(template) is None
    assert reasoning_of(template) is None
