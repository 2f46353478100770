"""What schemas come to: grammars that take the valid instances and no others, or a refusal by name."""

import itertools
import json
import random
import re
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words

DAYS = ("2024-02-29", "2000-02-29", "1999-12-31", "0001-04-30")
NO_DAYS = ("2021-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "0000-01-01")
UNLIKE_BOUNDS = (("minimum", 5), ("exclusiveMinimum", 7), ("maximum", 9), ("exclusiveMaximum", 9))
OBJECT = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
MAP = {"type": "object", "additionalProperties": {"type": "integer"}}
KIND = {"type": "object", "properties": {"kind": {"const": "x"}, "size": {"type": "integer"}}, "required": ["kind"]}
CLOSED = {"type": "object", "additionalProperties": False}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
VALUES: list[Any] = [
    None, True, False, 0, 1, 5, -3, 2.5, "", "x", "xy", "other", [], [1], [1, 1], ["x", 2], [2, "x"], ["x", "x"], {},
    {"a": 1}, {"b": 1},
    {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 3}, {"kind": "x"}, {"kind": "y"},
    {"kind": "x", "size": 1}, {"kind": "x", "size": "1"}, {"kind": "y", "size": "1"}, {"kind": 1},
    "2026-01-31", "not-a-date",
]  # fmt: skip
SCHEMAS: list[Any] = [
    True,
    {"type": ["integer", "null"]},
    {"enum": ["x", 5, None]},
    {"const": {"a": 1}},
    {"not": {"type": ["string", "object"]}},
    {"not": {"const": "x"}},
    {"not": {"enum": ["x", "xy", "", True]}},
    {"not": {"required": ["a"]}},
    {"not": {"required": ["a", "b"]}} | OBJECT,
    {"not": {"anyOf": [{"type": "string"}, {"minimum": 2}]}},
    {"not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}} | OBJECT,
    {"not": {"not": {"type": "string"}}},
    {"type": "string", "not": {"minLength": 2}},
    {"type": "array", "not": {"maxItems": 1}},
    {"not": {"properties": {"kind": {"type": "string"}}}, "properties": {"kind": {}}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "number"}, {"minimum": 2}]},
    {"oneOf": [{"const": "x"}, {"const": "xy"}, {"type": "null"}]},
    {"oneOf": [KIND, KIND | {"properties": {"kind": {"const": "y"}}}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]} | OBJECT,
    {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
    {"if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}, "then": KIND},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}},
    {"if": {"type": "string"}, "else": {"type": "null"}},
    {"dependentRequired": {"a": ["b"]}} | OBJECT,
    {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "b": {"required": ["c"]}}} | OBJECT,
    {"dependentSchemas": {"a": {"required": ["c"]}}} | OBJECT,
    {"type": "string", "format": "date"},
    {"type": "string", "format": "nobody-knows-this"},
    {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "$schema": "http://json-schema.org/draft-04/schema#"},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "contains": {"type": "string"}, "minContains": 0},
    {"$schema": DRAFT_7, "definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "minLength": 2},
    {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "minLength": 2},
    {"$defs": {"s": {"type": "string"}}, "not": {"$ref": "#/$defs/s"}},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, "x", 2, "xy", 5]}},
    {"uniqueItems": True, "items": {"enum": ["x", "xy", 2, "a", "b", "c", "d", 1]}, "maxItems": 2, "minItems": 1},
    {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/one"}, "$defs": {"one": {"const": 1}}},
    {"type": "array", "uniqueItems": True, "items": {"type": "string", "enum": [1, "x", 1.0, "xy", 5]}},
    {"type": "string", "uniqueItems": True, "contains": {"const": 1}},
    {"properties": {"kind": {"oneOf": [{"type": "integer"}, {"enum": ["x"]}]}}},
    {"contains": {"type": "string"}},
    {"type": "array", "contains": {"const": 1}, "maxItems": 1},
    {"$schema": DRAFT_7, "contains": {"const": 2}, "items": {"type": ["string", "integer"]}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]"}, "properties": {"a": {"const": 1}}},
    {"propertyNames": {"maxLength": 1}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"anyOf": [{"const": "a"}, {"$ref": "#/$defs/b"}]}, "$defs": {"b": {"const": "kind"}}},
    {"propertyNames": True},
    {"propertyNames": False},
    {"minProperties": 1} | OBJECT,
    {"maxProperties": 1} | OBJECT,
    {"minProperties": 2, "maxProperties": 2, "required": ["b"]} | OBJECT,
    {"minProperties": 2, "additionalProperties": False} | OBJECT,
    {"not": {"enum": [1, 5, "x"]}},
    {"not": {"const": 2.5}, "type": "number", "minimum": 1},
    {"type": "string", "not": {"type": "integer"}},
    {"type": ["string", "array"], "not": {"const": {"a": 1}}},
    {"not": {"oneOf": [{"type": "string"}, {"minLength": 2}, {"required": ["a"]}]}} | OBJECT,
    {"not": {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "null"}}},
    {"not": {"dependentRequired": {"a": ["b"]}}} | OBJECT,
    {"oneOf": [CLOSED | {"properties": {"a": {}, "b": {}}}, CLOSED | {"properties": {"b": {}, "c": {}}}]},
    {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "array", "items": {"type": "integer"}}]},
    {"components": {"s": {"oneOf": [{"type": "string"}, {"const": 1}]}}, "$ref": "#/components/s"},
    {"$defs": {"s": {"$anchor": "text", "type": "string"}}, "items": {"$ref": "#text"}},
    {"$id": "http://example.com/own", "$defs": {"s": {"const": "x"}}, "$ref": "http://example.com/own#/$defs/s"},
    {"$dynamicAnchor": "node", "type": ["object", "integer"], "additionalProperties": {"$dynamicRef": "#node"}},
    {"$defs": {"a b": {"const": 1}}, "items": {"$ref": "#/$defs/a%20b"}},
    {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"not": {"const": 1}}}},
    {"type": "array", "maxItems": 1.0},
    {"const": {"a": 1}, "$comment": {"$id": "of nobody"}},
]  # fmt: skip
REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at the top"),
    ({"uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5, 6]}}, "'uniqueItems' at the top"),
    ({"uniqueItems": True, "items": {"enum": list(range(5000))}}, "'uniqueItems' at the top"),
    ({"uniqueItems": True, "items": {"enum": [1, 2], "type": "integer"}, "prefixItems": []}, "'uniqueItems' at"),
    ({"properties": {"l": {"contains": {"type": "string"}, "minContains": 2}}}, "'contains' at /properties/l"),
    ({"contains": {"type": "string"}, "maxContains": 2}, "'contains' at the top"),
    ({"propertyNames": {"format": "uri"}}, "'propertyNames' at the top of the schema cannot be promised: of names"),
    ({"minProperties": 2, "properties": dict.fromkeys("abcdefg", True)}, "'minProperties' at the top"),
    ({"items": MAP | {"minProperties": 2}}, "'minProperties' at /items"),
    ({"items": {"const": [2**53 + 1]}}, "'const' at /items of the schema cannot be promised: it holds the number"),
    ({"items": {"minimum": 1e300}}, "'minimum' at /items"),
    ({"items": {"minimum": 10**400}}, "'minimum' at /items"),
    ({"items": {"const": 10**400}}, "'const' at /items"),
    ({"items": {"exclusiveMinimum": "x"}}, "'exclusiveMinimum' at /items"),
    ({"maxProperties": 2, "properties": dict.fromkeys("abcdefg", True)}, "'maxProperties' at the top"),
    ({"not": {"const": [1]}}, "enum or const with arrays"),
    (
        {"oneOf": [CLOSED | {"properties": {"a": {}}}, {"properties": {"a": {"type": "string"}}}]},
        "additionalProperties",
    ),
    ({"not": {"items": {"type": "string"}}}, "opposite of items"),
    ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"not": {"pattern": "x"}}}}, "'not' at /$defs/a"),
    ({"$defs": {"a": {"$id": "/a", "$dynamicRef": "#x"}}, "$ref": "#/$defs/a"}, "'$dynamicRef' at /$defs/a"),
    ({"enum": [[n] for n in range(300)], "oneOf": [{"required": [str(n)]} for n in range(300)]}, "too large"),
    ({"unevaluatedProperties": False}, "'unevaluatedProperties' at the top"),
    ({"not": {"type": "integer"}}, "'not' at the top"),
    ({"anyOf": [{"not": {"pattern": "^a"}}]}, "'not' at /anyOf/0"),
    ({"items": {"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}}, "'oneOf' at /items"),
    ({"if": {"multipleOf": 3}, "then": False}, "'if' at the top"),
    ({"pattern": "^(?!a)", "type": "string"}, "look-around"),
    ({"not": {}}, "Unsatisfiable"),
    (False, "no answer"),
    ({"$ref": "http://example.com/other"}, "'$ref' at the top of the schema cannot be promised: it is a reference to"),
    ({"properties": {"a/b~c": {"$ref": "#/$defs/absent"}}}, "'$ref' at /properties/a~1b~0c of the schema"),
    ({"items": {"$ref": "#/a%20b"}, "a b": {"items": {"not": {"pattern": "x"}}}}, "'not' at /a b/items of the schema"),
    ({"anyOf": 3}, "it should be a list of schemas"),
    ({"properties": {"a": 3}}, "a schema is an object or a boolean"),
    ([], "a schema is an object or a boolean"),
]


A = {"properties": {"a": {"type": "integer"}}}
TEXTS: list[tuple[Any, str, bool]] = [
    (A, r'{"\u0061":"x"}', False),
    (A, r'{"b\n":"\u001b"}', True),
    ({"allOf": [A, {"properties": {"b": {"type": "integer"}}}]}, r'{"\u0062":"x"}', False),
    ({"items": A | {"additionalProperties": {"type": "string"}}}, r'[{"\u0061":"x"}]', False),
    ({"items": A | {"additionalProperties": {"type": "string"}}}, r'[{"b":"x","a":1}]', False),  # their order
    ({"items": A | {"additionalProperties": {"type": "string"}}}, r'[{"a":1,"b":"x"}]', True),
    ({"patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}', False),
    ({"properties": {"a\n": {"type": "integer"}}}, r'{"a\u000a":"x"}', False),
    ({"properties": {"a\n": {"type": "integer"}}}, r'{"a\n":1}', True),
    ({"properties": {"\x7f": {"type": "integer"}}}, r'{"\u007f":"x"}', False),
    (OBJECT | {"minProperties": 2}, '{"x":1,"x":2}', False),
    (OBJECT | {"minProperties": 2}, '{"a":1,"x":2}', True),
    ({"type": "integer", "minimum": 2**53 + 1}, str(2**53), False),
    ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53), False),
    ({"type": "integer", "maximum": 2**53 + 1}, str(2**53 + 2), False),
    ({"type": "integer", "maximum": 2**63 - 1}, str(2**63), False),
    ({"type": "integer", "maximum": 2**63 - 1}, str(2**62), True),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, "5", True),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, str(-(2**63) - 1), False),
    *(({"type": "integer"} | dict(bounds), "6", False) for bounds in itertools.permutations(UNLIKE_BOUNDS)),
    *(({"type": "integer"} | dict(bounds), "8", True) for bounds in itertools.permutations(UNLIKE_BOUNDS)),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 5, "$schema": DRAFT_4}, "5", False),
    ({"type": "integer", "minimum": -(10**400), "maximum": 10**400}, "5", True),
    ({"const": -0.0}, "0", True),
    *(({"type": "string", "format": "date"}, f'"{day}"', day in DAYS) for day in (*DAYS, *NO_DAYS)),
    *(({"format": "date-time"}, f'"{day}T23:59:59.5+01:00"', day in DAYS) for day in (*DAYS, *NO_DAYS)),
    ({"format": "date-time"}, '"2024-02-29t00:00:00z"', True),
    ({"format": "date-time"}, '"2016-12-31T23:59:60Z"', False),
    ({"type": "string", "format": "time"}, '"23:59:60Z"', False),
    ({"type": "string", "format": "time"}, '"23:59:59Z"', True),
    ({"type": "string", "format": "date", "pattern": "^2"}, '"1999-01-01"', False),
    ({"type": "string", "format": "date", "pattern": "^2"}, '"2000-01-01"', True),
]
"""What an answer says, not only what it means: names and numbers have several spellings."""

MALFORMED: list[Any] = [
    {"required": 3}, {"not": {"required": 3}}, {"type": {"a": 1}}, {"not": {"type": 3}}, {"oneOf": [1, 2]},
    {"not": {"enum": 5}}, {"enum": "x"}, {"properties": []}, {"not": {"properties": []}}, {"dependentRequired": 3},
    {"dependencies": {"a": 3}}, {"not": {"minLength": "x"}}, {"not": {"allOf": 3}}, {"$ref": 3}, {"not": {"$ref": 3}},
    {"oneOf": {"a": 1}}, {"if": 3, "then": 4}, {"pattern": 3}, {"format": []}, {"uniqueItems": True, "maxItems": "x"},
    {"type": "nothing"}, {"minimum": "x"}, {"not": {"minimum": "x"}}, {"$schema": 3, "$ref": "#"}, None, "x", 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(ByteTable(), VOCAB_SIZE)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:80])
def test_a_grammar_takes_what_is_valid_and_nothing_else(schema: Any, vocabulary: Vocabulary) -> None:
    validator_class = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = validator_class(schema, format_checker=validator_class.FORMAT_CHECKER)
    matcher = vocabulary.matcher(json_schema_grammar(schema))
    for value in VALUES:
        assert any(takes(matcher, spelling) for spelling in orders(value)) == validator.is_valid(value), value


@pytest.mark.parametrize(("schema", "text", "is_taken"), TEXTS, ids=lambda value: json.dumps(value)[:60])
def test_a_grammar_takes_a_spelling_or_not(schema: Any, text: str, is_taken: bool, vocabulary: Vocabulary) -> None:
    assert takes(vocabulary.matcher(json_schema_grammar(schema)), text) == is_taken


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_what_cannot_be_promised_is_refused_by_name_and_place(schema: Any, words: str, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError, match=words.replace("$", r"\$")):
        vocabulary.matcher(json_schema_grammar(schema))


@pytest.mark.parametrize(("spelled", "otherwise"), [
    ({"$schema": "https://json-schema.org/draft-07/schema"}, {"$schema": DRAFT_7}),
    ({"$schema": "http://example.com/own"}, {}),
    ({"$defs": {"note": "no schema, but nobody refers to it"}}, {}),
    ({"definitions": {"s": {"uniqueItems": True}}}, {}),
])  # fmt: skip
def test_what_says_nothing_of_the_answer_changes_nothing(spelled: Any, otherwise: Any) -> None:
    items = {"items": [{"type": "string"}, {"type": "integer"}]}
    assert json_schema_grammar(spelled | items) == json_schema_grammar(otherwise | items)


@pytest.mark.parametrize("schema", MALFORMED, ids=json.dumps)
def test_a_malformed_schema_is_refused_or_means_nothing_more(schema: Any, vocabulary: Vocabulary) -> None:
    with suppress(GrammarError):  # and nothing else
        vocabulary.matcher(json_schema_grammar(schema))


@pytest.mark.parametrize(("keyword", "value", "expected"), [
    ("type", None, "a type's name or a list of them"),
    ("required", "a", "a list of texts"),
    ("required", ["a", None], "a list of texts"),
    ("properties", [], "an object of schemas"),
    ("anyOf", {"type": "string"}, "a list of schemas"),
    ("minLength", "3", "a number"),
    ("pattern", 5, "a text"),
])  # fmt: skip
def test_a_value_of_the_wrong_kind_is_named_with_its_keyword_and_its_place(
    keyword: str, value: Any, expected: str
) -> None:
    schema = {"type": "object", "properties": {"city": {keyword: value}}}
    named = f"'{keyword}' at /properties/city of the schema is {json.dumps(value)}, but it should be {expected}"
    with pytest.raises(GrammarError, match=re.escape(named)):
        json_schema_grammar(schema)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [2, 18, 21, 25, 27, 34, 36, 37, 39, 41, 46, 51])
def test_whatever_is_drawn_is_valid(number: int, seed: int, vocabulary: Vocabulary) -> None:
    schema, draws = SCHEMAS[number], random.Random(seed)
    matcher = vocabulary.matcher(json_schema_grammar(schema, any_whitespace=False))
    text = bytearray()
    while len(text) < 2000:
        token_ids, may_end = allowed(matcher, vocabulary)
        closing = [token_id for token_id in token_ids if chr(token_id) in '"]}0'] if len(text) > 200 else []
        if may_end and (not token_ids or len(text) > 100 or draws.random() < 0.2):
            break
        text.append(draws.choice(closing or [t for t in token_ids if t < 128] or token_ids))
        matcher.accept([text[-1]])
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_white_space_has_bounds(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(json_schema_grammar({"type": "array"}))
    assert matcher.num_valid(b"[" + b" " * 100) < 40
    assert vocabulary.matcher(json_schema_grammar({"type": "array"}, any_whitespace=False)).num_valid(b"[ 1]") == 1


def test_a_special_token_is_no_text(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(json_schema_grammar({"type": "string"}))
    matcher.accept(b'"<3')
    token_ids, _ = allowed(matcher, vocabulary)
    assert ord("0") in token_ids
    assert max(token_ids) < 256


def test_a_matcher_and_its_copy_go_ways_of_their_own(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.matcher(json_schema_grammar({"enum": ["ab", "ac"]}))
    matcher.accept(b'"a')
    other = matcher.copy()
    other.accept(b'b"')
    assert matcher.num_valid(b'c"') == 2
    matcher.accept(b'c"')
    assert matcher.is_complete
    assert other.is_complete
    with pytest.raises(GrammarError):
        matcher.accept(b"x")


def takes(matcher: Matcher, text: str) -> bool:
    copy, token_ids = matcher.copy(), list(text.encode())
    if copy.num_valid(token_ids) < len(token_ids):
        return False
    copy.accept(token_ids)
    return copy.fill(np.zeros(num_words(VOCAB_SIZE), dtype=np.int32))


def orders(value: Any) -> list[str]:
    """All spellings: the order of properties is the schema's, and no instance is wrong for having another."""
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps(dict(items)) for items in itertools.permutations(value.items())]


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> tuple[list[int], bool]:
    words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    may_end = matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist(), may_end
