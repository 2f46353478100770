"""How clients say what form an answer has, and what the engine is asked for."""

import asyncio
import json
from typing import Any

import pytest
from tests.runtime.server.test_bad_input import TEXT, post

from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.server.structured import Grammars, WantedGrammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OTHER_ORDER = {"type": "object", "properties": {"b": {}, "a": {}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}

TAG = {"format": {"type": "tag", "begin": "<|im_start|>", "content": {"type": "any_text"}, "end": "<|im_end|>"}}
STRUCTURES = [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}]
TYPE = {"type": "structural_tag"}
OLDER_TAG = TYPE | {"structures": STRUCTURES, "triggers": ["<f="]}


def grammar_of(running: Any, **fields: Any) -> str | None:
    """What the core is given."""
    running.client.completions.create(model="tiny", prompt="a", max_tokens=1, extra_body=fields)
    grammar: str | None = running.core.received[-1].spec.grammar
    return grammar


@pytest.mark.parametrize("fields", [
    {"response_format": FORMAT},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}},
    {"response_format": {"type": "json_schema", "schema": SCHEMA, "name": "answer", "strict": True}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA), "guided_regex": None, "response_format": {"type": "text"}},
])  # fmt: skip
def test_a_schema_is_asked_for_in_many_ways(running, fields) -> None:
    assert '"integer"' in (grammar_of(running, response_format=FORMAT) or "")
    assert grammar_of(running, **fields) == grammar_of(running, response_format=FORMAT)


def test_json_object_with_a_schema_is_an_object_that_follows_it(running) -> None:
    grammar = grammar_of(running, response_format={"type": "json_object", "schema": {"properties": {"a": {}}}}) or ""
    both = {"allOf": [{"type": "object"}, {"properties": {"a": {}}}]}
    assert grammar == grammar_of(running, guided_json=both)


@pytest.mark.parametrize(("older", "newer"), [
    ({"guided_regex": "a+b"}, {"structured_outputs": {"regex": "a+b"}}),
    ({"guided_choice": ["a", 'b "c"']}, {"structured_outputs": {"choice": ["a", 'b "c"']}}),
    ({"guided_grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ({"response_format": TAG | TYPE}, {"structured_outputs": {"structural_tag": json.dumps(TAG)}}),
    ({"response_format": OLDER_TAG}, {"structured_outputs": {"structural_tag": OLDER_TAG}}),
    ({"structural_tag": json.dumps(OLDER_TAG)}, {"structured_outputs": {"structural_tag": OLDER_TAG}}),
])  # fmt: skip
def test_both_names_of_vllm_ask_for_the_same(running, older, newer) -> None:
    assert grammar_of(running, **older) is not None
    assert grammar_of(running, **older) == grammar_of(running, **newer)


@pytest.mark.parametrize(("sglang", "vllm"), [
    ({"regex": "a+b"}, {"guided_regex": "a+b"}),
    ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
    ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
])  # fmt: skip
def test_sglangs_names_ask_for_the_same(running, sglang, vllm) -> None:
    assert grammar_of(running, **sglang) is not None
    assert grammar_of(running, **sglang) == grammar_of(running, **vllm)


def test_a_special_token_is_a_mark_of_a_structural_tag(running) -> None:
    begin, end = (running.tokenizer.token_to_id(mark) for mark in ("<|im_start|>", "<|im_end|>"))
    grammar = grammar_of(running, structured_outputs={"structural_tag": TAG}) or ""
    assert f"<[{begin}]>" in grammar
    assert f"<[{end}]>" in grammar


def test_the_order_of_properties_counts(running) -> None:
    reordered = {"type": "object", "properties": {"a": {}, "b": {}}}
    assert grammar_of(running, guided_json=OTHER_ORDER) != grammar_of(running, guided_json=reordered)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_text_follows_no_grammar(running, fields) -> None:
    assert grammar_of(running, **fields) is None


def test_a_chat_is_held_to_a_schema_too(running) -> None:
    running.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1, response_format=FORMAT
    )
    assert running.core.received[-1].spec.grammar == grammar_of(running, guided_json=SCHEMA)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type", '"xml" was given'),
    ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex", "send one"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": "[" * 100_000}, "guided_json", "no JSON"),
    ({"guided_json": '{"const": NaN}'}, "guided_json", "guided_json: "),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json", "guided_json: "),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "'uniqueItems' at the top"),
    ({"guided_json": False}, "guided_json", "no answer follows it"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "a\0"}, "guided_regex", "NUL"),
    ({"guided_regex": ""}, "guided_regex", "at least 1 character"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
    ({"guided_grammar": "root ::= foo"}, "guided_grammar", "foo"),
    ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is no JSON"),
    ({"structured_outputs": {"structural_tag": {"format": 3}}}, "structured_outputs.structural_tag", "format: "),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "format: Field required"),
    ({"response_format": OLDER_TAG | {"triggers": ["x"]}}, "response_format", "no trigger begins '<f=a>'"),
    ({"json_schema": SCHEMA, "regex": "a"}, "regex", "send one"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"guided_json": {"description": "x" * 1_000_000}}, "guided_json", "at most 1,000,000 characters"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "not support it"),
    ({"guided_json": SCHEMA, "use_beam_search": True}, "use_beam_search", "with a grammar"),
]


@pytest.mark.parametrize(("wrong", "param", "message"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(running, wrong, param, message) -> None:
    status, error = post(running, "/v1/completions", {**TEXT, **wrong})
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert running.core.received == []


NEVER: dict[str, Any] = {"type": "integer", "minimum": 5, "maximum": 3}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NEVER, "the top"),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": NEVER}, "required": ["b"]}, "/properties/b"),
        (
            {"type": "array", "minItems": 1, "items": {"anyOf": [NEVER]}, "$defs": {"a/b": {"type": "null"}}},
            "/items/anyOf/0",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "a$b"}}}, "/properties/a"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "^b^"}}}, "/$defs/a"),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"minimum": 5}}, "allOf": [
                {"properties": {"a": {"type": "integer", "maximum": 3}}}
            ]},
            "the top",
        ),
    ],
)  # fmt: skip
def test_what_the_backend_refuses_is_told_with_its_place(running, schema, place) -> None:
    status, error = post(running, "/v1/completions", {**TEXT, "guided_json": schema})
    assert status == 400
    assert error["message"].startswith(f"guided_json: what stands at {place} of the schema: ")


def test_what_was_refused_once_is_not_tried_again() -> None:
    grammars, made = Grammars(), list[str]()
    wanted = WantedGrammar("guided_grammar", "key", lambda: made.append("start: foo") or made[-1])

    async def ask_twice() -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=r"guided_grammar: .*foo"):
                await grammars.grammar_of(wanted, 1000)

    asyncio.run(ask_twice())
    grammars.close()
    assert len(made) == 1
