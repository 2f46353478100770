"""Chat templates see what transformers shows them."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
import tokenizers
from tests.runtime.server.chat_templates import CONVERSATIONS, OPTIONS, TEMPLATES
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HF = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "größer?  "},
    {"role": "assistant", "content": " It is "},
]


def render(source: str, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    """Where its templates leave a choice (content null or none, arguments as an object or text, parts), one of them."""
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for (talk, messages), options in itertools.product(CONVERSATIONS.items(), OPTIONS):
        expected = set(renderings(TEMPLATES[name], messages, options))
        prompt = prompt_or_none(template, messages, options)
        assert prompt in (expected or {prompt}), (talk, options)


QWEN = (  # as some of them check it
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('take turns') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "roles", "expected"),
    [
        (QWEN, "ssu", "<system>0\n1<user>2"),
        (QWEN, "sdu", "<system>0\n1<user>2"),
        (QWEN, "us", "<user>0\n1"),
        (QWEN, "susau", "<system>0<user>1\n2<assistant>3<user>4"),
        (QWEN, "uas", "<user>0<assistant>1<user>2"),
        (QWEN, "usu", "<user>0\n1\n2"),
        (ALTERNATING, "usau", "<user>0\n1<assistant>2<user>3"),
        (SILENT, "ssus", "<system>0\n1<user>2\n3"),
        (ALTERNATING, "uu", "<user>0\n1"),
        (ALTERNATING, "uauuau", "<user>0<assistant>1<user>2\n3<assistant>4<user>5"),
        ("{{ messages[-1].content }}", "uu", "1"),
        (TEMPLATES["chatml"], "ssus", None),
        (TEMPLATES["chatml"], "uu", None),
    ],
)
def test_system_messages_stand_where_the_template_takes_them(source: str, roles: str, expected: str | None) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    messages = [{"role": names[role], "content": str(index)} for index, role in enumerate(roles)]
    if expected is None:  # as they are
        expected = HF.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=False)
    assert render(source, messages, add_generation_prompt=False) == expected


@pytest.mark.parametrize(("refused", "expected"), [("user", "<tool>12\n1"), ("critic", "<tool>12<user>1")])
def test_a_turn_behind_a_result_is_a_part_of_it_where_the_template_refuses_one(refused: str, expected: str) -> None:
    source = (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role == 'tool' and m.role == '" + refused + "' %}"
        "{{ raise_exception('say something first') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "12"}
    messages = [{"role": "user", "content": "0"}, calling, result, {"role": "user", "content": "1"}]
    assert render(source, messages, add_generation_prompt=False) == "<user>0<assistant>" + expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'f' + f.description }}{% for name in f.parameters.properties.keys() %}{{ name }}{% endfor %}", "f"),
        ("{{ f | tojson }}", '{"name": "f"}'),
    ],
)
def test_a_tool_has_what_a_template_asks_of_it_and_no_more(source: str, expected: str) -> None:
    source = "{% set f = tools[0].function %}" + source
    assert render(source, [USER], tools=[{"type": "function", "function": {"name": "f"}}]) == expected


@pytest.mark.parametrize(("arguments", "expected"), [('{"a": 1}', "a"), ('{"a": ', "")])
def test_arguments_may_be_read_from_json(arguments: str, expected: str) -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        "{% if a is string %}{% set a = a | from_json %}{% endif %}{% for key, _ in a.items() %}{{ key }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert render(source, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]) == expected


def prompt_or_none(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    try:
        return template.render(messages, **options)
    except ConversationRefusedError:
        return None


def renderings(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> Iterator[str]:
    """By transformers, of the conversation in every spelling that means the same and that the template prints."""
    continues = options.get("continue_final_message", False)
    begins = not continues and options.get("add_generation_prompt", True)
    wanted = {"tools": None, "documents": None} | options | {"add_generation_prompt": begins}
    variables = wanted.pop("variables", {})
    for spelt in spellings(messages, source):
        for drops_null in (True, False):
            try:
                if drops_null:
                    text = HF.apply_chat_template(spelt, chat_template=source, tokenize=False, **wanted, **variables)
                else:
                    (text,), _ = render_jinja_template([spelt], chat_template=source, **wanted, **SPECIAL, **variables)
            except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError):
                continue
            if "None" not in text and "{'" not in text:
                yield text


def spellings(messages: list[dict[str, Any]], source: str) -> Iterator[list[dict[str, Any]]]:
    choices = []
    for message in messages:
        message = dict(message)
        if message["role"] == "developer" and "developer" not in source:
            message["role"] = "system"
        contents = [message.get("content")]
        if isinstance(contents[0], list):
            joined = "\n".join(part["text"] for part in contents[0])
            contents = [contents[0], joined, [{"type": "text", "text": joined}]]
        elif isinstance(contents[0], str):
            contents.append([{"type": "text", "text": contents[0]}])
        else:
            contents.append("")
        calls = [message.get("tool_calls")]
        if calls[0] is not None:
            calls.append([parsed(call) for call in calls[0]])
        choices.append(
            [message | {"content": c} | ({} if t is None else {"tool_calls": t}) for c in contents for t in calls]
        )
    for choice in itertools.product(*choices):
        yield json.loads(json.dumps(choice))


def parsed(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}


def test_words_of_a_template_that_refuses_reach_the_client() -> None:
    with pytest.raises(ConversationRefusedError, match="only two roles"):
        render("{{ raise_exception('only two roles') }}")


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ 1 / divisor }}", {"divisor": 0}),
        ("{{ 2.0 ** exponent }}", {"exponent": 10**6}),
        ("{{ 'a' * number }}", {"number": 10**30}),
        ("{% macro walk(x) %}{{ walk(x) }}{% endmacro %}{{ walk(tree) }}", {"tree": []}),
    ],
)
def test_whatever_goes_wrong_with_a_clients_values_is_told_as_its_request_at_fault(source: str, variables) -> None:
    with pytest.raises(ConversationRefusedError, match=r"refuses these messages: ."):
        render(source, variables=variables)


def test_what_a_template_says_is_told_up_to_a_length() -> None:
    with pytest.raises(ConversationRefusedError) as caught:
        render("{{ raise_exception(words) }}", variables={"words": "x" * 10**6})
    assert len(str(caught.value)) < 1000


def test_a_prompt_that_a_clients_variable_makes_enormous_is_refused() -> None:
    """Templates print special tokens with each message, and a client may name its own."""
    source = "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}"
    num_chars = len(render(source, variables={"bos_token": "x" * 1000}))
    template = ChatTemplate(source, {}, max_chars=num_chars)
    assert len(template.render(MESSAGES, variables={"bos_token": "x" * 1000})) == num_chars
    with pytest.raises(ConversationRefusedError, match=f"made {num_chars + 3} characters .* send fewer messages"):
        template.render(MESSAGES, variables={"bos_token": "x" * 1001})


def test_a_prompt_that_takes_too_long_to_render_is_refused() -> None:
    source = "{% for entry in custom_tools %}{{ entry | tojson(indent=4) }}{% endfor %}"
    assert render(source, variables={"custom_tools": [1] * 1000}) == "1" * 1000
    with pytest.raises(ConversationRefusedError, match="less in chat_template_kwargs"):
        ChatTemplate(source, {}, max_seconds=0.0).render(MESSAGES, variables={"custom_tools": [1] * 1000})


def test_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(ConversationRefusedError, match="cannot be continued"):
        render("{{ messages[0].content }}", continue_final_message=True)


def test_templates_cannot_leave_the_sandbox() -> None:
    with pytest.raises(ConversationRefusedError, match="unsafe"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")


USER, CALLS = {"role": "user", "content": "q"}, [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
CALLING = {"role": "assistant", "content": None, "tool_calls": CALLS}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LISTED = {"role": "user", "content": PARTS}
LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "message", "prompt"),
    [
        ("{% if m.content is none %}call{% else %}{{ m.content }}{% endif %}", CALLING, "call"),
        ("{% if m['content'] == none %}call{% endif %}", CALLING, "call"),
        ("{% if m.get('content') is not none %}text{% else %}call{% endif %}", CALLING, "call"),
        ("{% if not m.content %}call{% endif %}", CALLING, "call"),
        ("{{ 'a' + m.content + 'b' }}{{ m.content }}{{ m.content | trim }}{{ m.content ~ 'c' }}", CALLING, "abc"),
        ("{{ m.content.split('</think>')[-1].lstrip() }}{{ '</think>' in m.content }}", CALLING, "False"),
        ("{{ m.content | default('no') }} {{ m.content | tojson }} {{ m.content | length }}", CALLING, "no null 0"),
        ("{{ call.arguments }}", CALLING, '{"x": 1}'),
        ("{{ '<' + call.arguments + '>' }}", CALLING, '<{"x": 1}>'),
        ("{{ call.arguments | tojson }}", CALLING, '{"x": 1}'),
        ("{{ call.arguments is string }}{{ call.arguments.x }}", CALLING, "False1"),
        ("{{ m.content }}", LISTED, "one\ntwo"),
        ("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}", LISTED, "onetwo"),
        ("{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}", LISTED, "onetwo"),
        (LOOP, USER, "q"),
        ("{{ m.content | map(attribute='text') | join('+') }}", LISTED, "one+two"),
        ("{{ m.content | tojson }}", LISTED, '"one\\ntwo"'),
        ("{{ m.content[0].text }}", LISTED, "one\ntwo"),
    ],
)
def test_a_template_gets_a_message_in_the_shape_that_it_asks_for(source: str, message: dict, prompt: str) -> None:
    loop = "{% for m in messages %}{% set call = (m.tool_calls or [{}])[0].function %}"
    assert render(f"{loop}{source}{{% endfor %}}", [message]) == prompt


def test_a_template_that_takes_lists_of_one_role_gets_text_of_the_other() -> None:
    branch = "{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content | trim }}{% endif %}"
    source = f"{{% for m in messages %}}{branch}{{% endfor %}}"
    assert render(source, [{"role": "system", "content": PARTS}, LISTED]) == "one\ntwoonetwo"


@pytest.mark.parametrize(
    ("arguments", "text", "value"),
    [('{"x": 1}', '{"x": 1}', '{"x": 1}'), ({"x": 1}, '{"x":1}', '{"x": 1}'), (None, "{}", "{}"), ("", "{}", "{}")],
)
def test_arguments_are_an_object_and_its_text_however_they_are_sent(arguments: Any, text: str, value: str) -> None:
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ '' + a }} {{ a | tojson }}"
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render(source, [CALLING | {"tool_calls": [call]}]) == f"{text} {value}"


@pytest.mark.parametrize("arguments", ['{"x": "y', "{'x': 1}", "[" * 100_000, '"\\ud800"', "NaN", "null", "[1]"])
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ a }}", "{}"),
        ("{{ '<' + a + '>' }}", "<{}>"),
        ("{% for key, value in a.items() %}{{ key }}{% endfor %}", ""),
        ("{% for key, value in a | items %}{{ key }}{% endfor %}", ""),
        ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", "{}"),
        ("{% if a is mapping %}mapping{% endif %}", "mapping"),
    ],
)
def test_a_call_that_was_cut_does_not_end_the_conversation(arguments: str, source: str, wanted: str) -> None:
    source = f"{{% set a = messages[0].tool_calls[0].function.arguments %}}{source}"
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render(source, [CALLING | {"tool_calls": [call]}]) == wanted.replace("{}", arguments)


def test_ids_of_other_servers_are_shortened_for_templates_that_refuse_them() -> None:
    source = """{%- for m in messages %}{%- for call in m.tool_calls or [] %}
    {%- if call.id | length != 9 %}{{ raise_exception('no') }}{% endif %}{{ call.id }} {% endfor %}
    {%- if m.tool_call_id %}{{ m.tool_call_id }} {% endif %}{% endfor %}"""
    calls = [{"id": call_id, "function": {"name": "f", "arguments": "{}"}} for call_id in ("call_1", "abcdefghi")]
    results = [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
    conversation = [USER, CALLING | {"tool_calls": calls}, *results]
    first, second, *of_results = render(source, conversation).split()
    assert re.fullmatch("[0-9a-f]{9}", first)
    assert [second, *of_results] == ["abcdefghi", first, "abcdefghi"]
    assert [call["id"] for call in calls] == ["call_1", "abcdefghi"]


@pytest.mark.parametrize(
    ("effort", "variables", "seen"),
    [
        (None, {}, "-,-,-"),
        ("low", {}, "low,True,True"),
        ("none", {}, "none,False,False"),
        ("high", {"enable_thinking": False, "reasoning_effort": "max"}, "max,False,True"),
    ],
)
def test_the_effort_reaches_a_template_under_the_names_that_templates_use(effort, variables, seen: str) -> None:
    names = ("reasoning_effort", "enable_thinking", "thinking")
    source = "{{ [" + ", ".join(f"{name} | default('-')" for name in names) + "] | join(',') }}"
    assert render(source, reasoning_effort=effort, variables=variables) == seen


def test_what_a_template_takes_is_found_where_it_asks_for_a_system_message() -> None:
    refusal = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    source = f"{refusal}{{% for m in messages %}}{LOOP}{{% endfor %}}"
    assert render(source, [{"role": "system", "content": "be brief"}, LISTED]) == "be briefonetwo"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{{ messages[0].role }}{# for developers #}", "system"),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{{ m.role }}{{ m.content }}{% endif %}{% endfor %}",
            "developerx",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}{% for p in m.content if p.text %}{{ m.role }}"
            "{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
            "developerx",
        ),
    ],
)
def test_developer_is_the_new_name_of_system_for_templates_that_do_not_know_it(source: str, role: str) -> None:
    assert render(source, [{"role": "developer", "content": "x"}]) == role


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0]"),
        ({"role": "critic", "content": "hi"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
    ],
)
def test_a_message_at_fault_is_named(message: Any, field: str) -> None:
    with pytest.raises(ConversationRefusedError) as caught:
        render("{{ messages }}", [message])
    assert caught.value.field == field
