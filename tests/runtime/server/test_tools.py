"""Calls of tools and thoughts, asked through the official client of a server whose model writes what it is told."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.runtime.server.conftest import Running, byte_level_tokenizer, running_server
from tests.runtime.server.test_resumption import added_up, split, stream
from tokenizers import AddedToken

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.errors import ConfigurationError
from kvasir_runtime.server.answer_formats import answer_formats
from kvasir_runtime.structured.thought_budget import parted
from kvasir_runtime.structured.vocabulary import Vocabulary, num_words

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "...", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("weather", "time")
]
ECHO = (
    "{% if enable_thinking is false %}<think></think>{% endif %}{{ messages[-1].content }}<|im_end|>"
    "{# MARKS dictionary of argument name #}"
)
"""The fake core repeats its prompt, so the last message is what the model writes, to its end of turn."""
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
CITY = '{"city": "Köln", "days": [1, 2]}'


QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")


@contextmanager
def talking(tmp_path_factory: pytest.TempPathFactory, *marks: str, are_special: bool = True) -> Iterator[Running]:
    """A server whose model writes the last message's content; its template and its vocabulary have these marks."""
    folder = tmp_path_factory.mktemp("models") / "talking"
    folder.mkdir()
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=are_special) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": ECHO.replace("MARKS", " ".join(marks)), "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with running_server(folder, tmp_path_factory.mktemp("ipc")) as running:
        running.core.step_seconds = 0.0
        yield running


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Of Qwen's marks, which are tokens and not special."""
    with talking(tmp_path_factory, *QWEN, are_special=False) as running:
        yield running


@pytest.fixture
def model(own_model: Running) -> Running:
    own_model.core.received, own_model.core.aborted = [], []
    return own_model


def wishes(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "talking", "messages": [{"role": "user", "content": text}], "tools": TOOLS, **options}


def answer(model: Running, text: str, **options: Any) -> Any:
    [choice] = model.client.chat.completions.create(**wishes(text, **options)).choices
    return choice


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def test_a_call_is_answered_as_openai_does(model: Running) -> None:
    choice = answer(model, WEATHER)
    [call] = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
    assert calls_of(choice) == [("weather", CITY)]
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    ("text", "content", "calls", "finish_reason"),
    [
        ("Hello.", "Hello.", [], "stop"),
        ("", "", [], "stop"),
        (f"I look.\n{WEATHER}", "I look.", [("weather", CITY)], "tool_calls"),
        (f"{WEATHER}\n{TIME}", None, [("weather", CITY), ("time", "{}")], "tool_calls"),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', ..., [], "stop"),
        (
            '<tool_call>{"name": "weather", "arguments": {"city"</tool_call>',
            None,
            [("weather", '{"city"')],
            "tool_calls",
        ),
    ],
)
def test_text_and_calls_are_told_apart(model: Running, text, content, calls, finish_reason) -> None:
    choice = answer(model, text)
    assert choice.message.content == (text if content is ... else content)
    assert (calls_of(choice), choice.finish_reason) == (calls, finish_reason)


def test_plain_answers_have_no_empty_list_of_calls(model: Running) -> None:
    body = model.http.post("/v1/chat/completions", json=wishes("Hello.")).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}


@pytest.mark.parametrize("num_tokens", range(1, 64, 7))
def test_a_call_that_is_cut_says_length(model: Running, num_tokens: int) -> None:
    choice = answer(model, WEATHER, max_tokens=num_tokens)
    assert choice.finish_reason == "length"
    assert all(CITY.startswith(arguments.rstrip("\N{REPLACEMENT CHARACTER}")) for _, arguments in calls_of(choice))


TEXTS = {
    "plain": "Hello.",
    "call": WEATHER,
    "calls behind text": f"I look.\n{WEATHER}\n{TIME}",
    "thought": "<think>\nWhat now?\n</think>\n\nHello.",
    "thought and calls": f"<think>\nWhat now?\n</think>\n\n{WEATHER}\n{TIME}",
    "thought alone": "<think>\nWhat now",
    "broken": '<tool_call>{"name": "weather", "arguments": {"city" 1</tool_call>',
    "no call": "<tool_call>hello</tool_call>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_stream_adds_up_to_the_whole(model: Running, text: str) -> None:
    whole = answer(model, text)
    with model.client.chat.completions.stream(**wishes(text)) as events:
        for _ in events:
            pass
        [streamed] = events.get_final_completion().choices
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert calls_of(streamed) == calls_of(whole)
    assert thought_of(streamed) == thought_of(whole)
    assert streamed.finish_reason == whole.finish_reason


def thought_of(choice: Any) -> Any:
    message = choice.message.to_dict()
    return message.get("reasoning"), message.get("reasoning_content")


def test_id_type_name_and_role_come_once_and_arguments_as_they_come(model: Running) -> None:
    chunks = list(model.client.chat.completions.create(**wishes(f"{WEATHER}\n{TIME}", stream=True)))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [piece.function.name for piece in pieces if piece.id is not None] == ["weather", "time"]
    assert [piece.type for piece in pieces if piece.type is not None] == ["function"] * 2
    assert [piece.function.name for piece in pieces if piece.function.name is not None] == ["weather", "time"]
    assert len([delta for delta in deltas if delta.role is not None]) == 1
    assert "".join(piece.function.arguments for piece in pieces if piece.index == 0) == CITY
    assert len([piece for piece in pieces if piece.index == 0]) > 5
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].choices[0].delta.content) == ("tool_calls", None)


def test_calls_have_ids_of_their_own(model: Running) -> None:
    choices = model.client.chat.completions.create(**wishes(f"{WEATHER}\n{TIME}", n=2)).choices
    again = model.client.chat.completions.create(**wishes(f"{WEATHER}\n{TIME}", n=2)).choices
    assert len({call.id for choice in [*choices, *again] for call in choice.message.tool_calls}) == 8


@pytest.mark.parametrize("name", ["calls behind text", "thought and calls", "broken"])
@pytest.mark.parametrize("options", [{}, {"n": 2}, {"logprobs": True, "return_token_ids": True}], ids=str)
def test_a_stream_cut_at_any_event_goes_on_as_it_would_have(model: Running, name: str, options: dict[str, Any]) -> None:
    path, body = "/v1/chat/completions", wishes(TEXTS[name], stream=True, **options)
    blocks = stream(model, path, body)
    whole = joined_calls(split(blocks)[1])
    for cut in range(1, len(blocks), 9):
        journal, before = split(blocks[:cut])
        after = split(stream(model, path, body, journal))[1]
        assert joined_calls(before + after) == whole, f"cut after {cut} blocks"


def joined_calls(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events added up, and the pieces of each call."""
    calls: dict[tuple[int, int, str], str] = {}
    for event in events:
        for choice in event["choices"]:
            for piece in choice["delta"].pop("tool_calls", []):
                flat = {"id": piece.get("id", ""), "type": piece.get("type", "")} | piece["function"]
                for key, text in flat.items():
                    place = (choice["index"], piece["index"], key)
                    calls[place] = calls.get(place, "") + text
    return added_up(events) | {"calls": calls}


def test_logprobs_are_of_every_token_whatever_it_became(model: Running) -> None:
    text = TEXTS["thought and calls"]
    chunks = model.client.chat.completions.create(**wishes(text, stream=True, logprobs=True))
    tokens = [
        bytes(token.bytes)
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert b"".join(tokens).decode() == f"{text}<|im_end|>"


def test_one_call_is_answered_where_several_are_not_wanted(model: Running) -> None:
    assert calls_of(answer(model, f"{TIME}\n{WEATHER}", parallel_tool_calls=False)) == [("time", "{}")]


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}], ids=str)
def test_without_tools_to_call_a_call_is_text(model: Running, options: dict[str, Any]) -> None:
    choice = answer(model, WEATHER, **options)
    assert (choice.message.content, choice.message.tool_calls) == (WEATHER, None)


def test_allowed_tools_are_the_only_ones(model: Running) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = answer(model, f"{WEATHER}\n{TIME}", tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (choice.message.content, calls_of(choice)) == (WEATHER, [("time", "{}")])


# Thoughts.


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
@pytest.mark.parametrize(
    ("text", "options", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nHello.", {}, "Hm.", "Hello."),
        ("<think>\n\n</think>\n\nHello.", {}, None, "Hello."),
        ("<think>Hm", {}, "Hm", None),
        ("Hello.", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, None, "Hello."),
        ("<think>Hm</think>Hello.", {"extra_body": {"include_reasoning": False}}, None, "Hello."),
    ],
)
def test_a_thought_is_no_part_of_the_answer(model: Running, tools, text, options, reasoning, content) -> None:
    message = answer(model, text, **{"tools": tools} | options).message.to_dict()
    assert (message.get("reasoning_content"), message.get("reasoning")) == (reasoning, reasoning)
    assert message["content"] == content


@pytest.mark.parametrize("options", [{}, {"n": 2}, {"extra_body": {"include_reasoning": False}}])
@pytest.mark.parametrize(("text", "share"), [("<think>abcdefgh</think>ijkl", 2 / 3), ("Hello.", 0), ("<think>abc", 1)])
def test_usage_says_how_much_was_thought(model: Running, text: str, share: float, options: dict[str, Any]) -> None:
    asked = wishes(text, tools=[], **options)
    whole = model.client.chat.completions.create(**asked).usage
    streamed = model.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    assert [chunk.usage for chunk in streamed][-1] == whole
    num_each = whole.completion_tokens // options.get("n", 1)
    assert whole.completion_tokens_details.reasoning_tokens == options.get("n", 1) * round(num_each * share)


def test_effort_none_switches_thinking_off(model: Running) -> None:
    model.client.chat.completions.create(**wishes("Hello.", reasoning_effort="none"))
    [request] = model.core.received
    assert model.tokenizer.decode(request.spec.prompt_token_ids).startswith("<think></think>")


def grammar_of(model: Running, **options: Any) -> str | None:
    """Of what a request asks for in its own words."""
    model.core.received.clear()
    answer(model, "Hello.", **options)
    [request] = model.core.received
    return request.spec.grammar


def test_a_structured_answer_comes_behind_a_thought_and_a_budget_ends_that(model: Running) -> None:
    held = grammar_of(model, tools=None, extra_body={"structured_outputs": {"regex": "a+"}})
    ended = grammar_of(
        model, tools=None, extra_body={"structured_outputs": {"regex": "a+"}, "thinking_token_budget": 7}
    )
    free = grammar_of(model, tools=None, extra_body={"thinking_token_budget": 7})
    assert grammar_of(model, tools=None) is None
    assert "a+" in held
    assert "think" in held
    assert "a+" in ended
    for limited in (ended, free):
        budget, _ = parted(limited)
        assert (budget.max_tokens, budget.opened, budget.closed) == (7, "<think>", "</think>")


OTHERS: list[tuple[tuple[str, ...], str, str | None, str]] = [
    (QWEN, f"<think>Hm</think><|im_start|>Hi. {WEATHER}<|im_start|>", "Hi.", r"call_[0-9a-f]{24}"),
    (
        KIMI,
        "Hi.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>"
        f"{CITY}<|tool_call_end|><|tool_calls_section_end|>",
        "Hi.",
        r"functions\.weather:3",
    ),
    (("[TOOL_CALLS]", "[ARGS]"), f"[TOOL_CALLS]weather[ARGS]{CITY}", None, r"[0-9a-zA-Z]{9}"),
    (
        CHANNELS,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{CITY}",
        None,
        r"call_[0-9a-f]{24}",
    ),
]


@pytest.mark.parametrize(("marks", "text", "content", "call_id"), OTHERS, ids=["qwen", "kimi", "mistral", "gpt-oss"])
def test_marks_that_are_special_tokens_are_read_and_others_stay_hidden(
    tmp_path_factory: pytest.TempPathFactory, marks: tuple[str, ...], text: str, content: str | None, call_id: str
) -> None:
    with talking(tmp_path_factory, *marks) as model:
        choice = answer(model, text)
        assert (choice.message.content, calls_of(choice)) == (content, [("weather", CITY)])
        assert re.fullmatch(call_id, choice.message.tool_calls[0].id)
        assert choice.message.to_dict().get("reasoning") == ("Hm" if "Hm" in text else None)
        assert grammar_of(model, tool_choice="required") is not None


def test_marks_of_calls_stay_hidden_where_nothing_may_be_called(tmp_path_factory: pytest.TempPathFactory) -> None:
    with talking(tmp_path_factory, *QWEN) as model:
        assert answer(model, f"Hi.{WEATHER}", tool_choice="none").message.content == "Hi." + WEATHER.replace(
            "<tool_call>", ""
        ).replace("</tool_call>", "")


def test_a_call_of_gpt_oss_is_text_without_marks_where_nothing_may_be_called(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    marks, text, _, _ = OTHERS[-1]
    with talking(tmp_path_factory, *marks) as model:
        for options in ({"tool_choice": "none"}, {"tools": None}):
            choice = answer(model, text, **options)
            assert choice.message.content == f"to=functions.weather {CITY}"
            assert (choice.message.to_dict()["reasoning"], choice.finish_reason) == ("Hm", "stop")
        cut = answer(model, text, tool_choice="none", max_tokens=len(model.tokenizer.encode(text).ids) - 20)
        assert "<|" not in (cut.message.content or "")


# What a model is held to.

STRICT = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "time"}}
RIGHT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
WRONG = RIGHT.replace("2", "true")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "time"}}
THOUGHT = "<think>\nHm.\n</think>\n\n"
HELD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "required": (
        {"tool_choice": "required", "tools": [STRICT, OTHER]},
        [RIGHT, TIME, THOUGHT + RIGHT, f"{RIGHT}\n{TIME}"],
        ["Hello.", WRONG, f"Hello.\n{RIGHT}", THOUGHT, "", f"{RIGHT} Hello."],
    ),
    "one": (
        {"tool_choice": "required", "tools": [STRICT, OTHER], "parallel_tool_calls": False},
        [RIGHT, TIME],
        [f"{RIGHT}\n{TIME}"],
    ),
    "named": ({"tool_choice": NAMED, "tools": [STRICT, OTHER]}, [TIME, THOUGHT + TIME], [RIGHT, f"{TIME}\n{TIME}"]),
    "strict": (
        {"tools": [STRICT, OTHER]},
        ["Hello.", RIGHT, f"Hello.\n{RIGHT}", THOUGHT + RIGHT, f"{THOUGHT}Hello.", TIME],
        [WRONG, f"Hello. {WRONG}", THOUGHT + WRONG],
    ),
    "format": (
        {"response_format": FORMAT},
        ['{"a": 1}', WEATHER, TIME, THOUGHT + '{"a": 1}', THOUGHT + WEATHER],
        ["Hello.", '{"a": "b"}', f'{{"a": 1}}{TIME}'],
    ),
    "format and required": ({"response_format": FORMAT, "tool_choice": "required"}, [WEATHER], ['{"a": 1}']),
    "format, no tools": ({"response_format": FORMAT, "tool_choice": "none"}, ['{"a": 1}'], [WEATHER]),
    "regex": ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, ["aa", THOUGHT + "aa"], [WEATHER, "b"]),
    "thinking off": (
        {"tool_choice": "required", "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        [WEATHER],
        ["Hello."],
    ),
}


def follows(vocabulary: Vocabulary, model: Running, grammar: str, text: str) -> bool:
    """Whether this is a whole answer."""
    matcher, token_ids = vocabulary.matcher(grammar), model.tokenizer.encode(text).ids
    if matcher.num_valid(token_ids) < len(token_ids):
        return False
    matcher.accept(token_ids)
    words = np.zeros(num_words(model.tokenizer.get_vocab_size()), dtype=np.int32)
    return matcher.is_complete or matcher.fill(words)


@pytest.fixture(scope="module")
def vocabulary(own_model: Running) -> Vocabulary:
    tokenizer = Tokenizer(own_model.tokenizer, {"eos_token": "<|im_end|>"})
    return Vocabulary(tokenizer, own_model.tokenizer.get_vocab_size())


@pytest.mark.parametrize("name", HELD)
def test_what_is_asked_for_is_all_that_a_model_can_write(model: Running, vocabulary: Vocabulary, name: str) -> None:
    options, right, wrong = HELD[name]
    grammar = grammar_of(model, **options)
    assert grammar is not None
    assert [text for text in right if not follows(vocabulary, model, grammar, text)] == []
    assert [text for text in wrong if follows(vocabulary, model, grammar, text)] == []


@pytest.mark.parametrize("options", [{}, {"tool_choice": "auto"}, {"tool_choice": "none", "tools": [STRICT]}], ids=str)
def test_a_model_that_may_choose_is_free(model: Running, options: dict[str, Any]) -> None:
    assert grammar_of(model, **options) is None


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=str)
def test_an_answer_that_is_one_call_ends_as_openais_do(model: Running, choice: Any, reason: str) -> None:
    assert answer(model, TIME, tool_choice=choice).finish_reason == reason


UNIQUE = {"type": "object", "properties": {"cities": {"type": "array", "uniqueItems": True}}}


def test_a_schema_that_cannot_be_promised_is_refused_where_it_is_strict(model: Running) -> None:
    function = {"name": "weather", "parameters": UNIQUE}
    body = wishes(WEATHER, tool_choice="required", tools=[{"type": "function", "function": function}])
    assert model.http.post("/v1/chat/completions", json=body).status_code == 200
    body["tools"][0]["function"] = function | {"strict": True}
    response = model.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "'weather'" in response.json()["error"]["message"]
    assert "uniqueItems" in response.json()["error"]["message"]


def test_text_of_a_form_and_a_call_cannot_both_be_asked_for(model: Running) -> None:
    body = wishes("a", tool_choice="required", guided_regex="a+")
    response = model.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


# Which formats a server knows.

SHOWN = "<think> </think> <tool_call>"


@pytest.mark.parametrize(
    ("calls", "reasoning", "known"),
    [
        (None, None, ("hermes", True)),
        ("kimi_k2", "qwen3", ("kimi_k2", True)),
        ("none", "none", (None, False)),
    ],
)
def test_flags_go_before_what_the_template_shows(model: Running, calls, reasoning, known) -> None:
    formats = answer_formats(Tokenizer(model.tokenizer, {}), SHOWN, calls, reasoning)
    assert (formats.calls_name, formats.reasoning is not None) == known


OWN = {
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open_pattern": "<call>",
            "close": "</call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    }
}


@pytest.mark.parametrize(("shown", "name"), [("", "hf"), (SHOWN, "hermes")])
def test_what_a_checkpoint_describes_itself_is_used_where_its_template_shows_nothing_known(
    model: Running, shown: str, name: str
) -> None:
    formats = answer_formats(Tokenizer(model.tokenizer, {"response_template": OWN}), shown, None, None)
    assert formats.calls_name == name
    assert formats.reasoning is not None
    named = answer_formats(Tokenizer(model.tokenizer, {"response_template": OWN}), SHOWN, "hf", "hf")
    assert named.calls_name == "hf"


@pytest.mark.parametrize("names", [("hermess", None), (None, "qwen")], ids=str)
def test_a_format_that_nobody_knows_is_refused_with_those_there_are(model: Running, names: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"parser is 'hermess'; .*hermes|parser is 'qwen'; .*qwen3, .*none"):
        answer_formats(Tokenizer(model.tokenizer, {}), SHOWN, *names)


# What a server without a format says.


def test_tools_of_a_model_whose_format_is_unknown_are_refused(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    response = running.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "--tool-call-parser" in response.json()["error"]["message"]
    assert running.http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).status_code == 200
