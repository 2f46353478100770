"""What a model held to a grammar of calls writes is read as calls, with arguments that follow their schemas."""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.runtime.talk.answers import joined

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.vocabulary import Vocabulary, num_words
from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event
from kvasir_runtime.talk.format import CallFormat
from kvasir_runtime.talk.formats import FORMATS
from kvasir_runtime.talk.grammar import CallableTool, calls_grammar
from kvasir_runtime.talk.parser import AnswerParser

BAR = "\uff5c"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["celsius", "a \"b\"/'c'"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "exact": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "place": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
    },
    "required": ["city", "days", "place", "code"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "within": {"$ref": "#/$defs/place"}, "size": {"type": "number"}},
            "required": ["name"],
        }
    },
    "additionalProperties": False,
}
TOOLS = [
    CallableTool("weather", SCHEMA, is_strict=True),
    CallableTool("weather_now", {"type": "object", "properties": {}, "additionalProperties": False}, is_strict=True),
    CallableTool("remember", None, is_strict=False),
]
SCHEMAS = {tool.name: tool.parameters or {"type": "object"} for tool in TOOLS}
SPECIAL: dict[str, Sequence[str]] = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "deepseek_v3": [
        f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "functiongemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek_v32": [f"{BAR}DSML{BAR}"],
    "openai": ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
    "granite": ["<|tool_call|>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>"],
    "gigachat3": ["<|function_call|>"],
}  # fmt: skip
SPECIAL["deepseek_v31"] = SPECIAL["deepseek_v3"]
NAMES = [
    "hermes", "qwen3_coder", "seed_oss", "llama3_json", "pythonic", "olmo3", "mistral", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "kimi_k2", "glm45", "gemma4", "functiongemma", "granite", "phi4_mini_json", "minimax_m2", "json",
    "openai", "lfm2", "hunyuan_a13b", "nemotron_json", "internlm", "longcat", "gigachat3", "minicpm5",
]  # fmt: skip

BARE = [calls for calls in FORMATS.values() if isinstance(calls, CallFormat) and calls.bare]


class Model:
    """Its tokens are bytes and special ones; what it writes is drawn, with a liking for marks."""

    special_ids: frozenset[int]

    def __init__(self, specials: Sequence[str], name: str) -> None:
        self._specials = list(specials)
        self.vocab_size = 256 + len(specials)
        self.special_ids = frozenset(range(256, self.vocab_size))
        self.ids = {text: 256 + number for number, text in enumerate(specials)}
        marks = {'"', "'", "}", "]", ")", "]]", "}}", '"}', '"]', *texts_in(FORMATS[name])} - {"", *self.ids}
        self._marks = [self.token_ids(mark) for mark in sorted({*marks, *("\n" + mark for mark in marks)})]
        self._vocabulary = Vocabulary(self, self.vocab_size)

    def token(self, token_id: int) -> str:
        return self._specials[token_id - 256]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.token(token_id).encode()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def token_ids(self, text: str) -> list[int]:
        pieces = re.split("|".join(f"({re.escape(special)})" for special in self._specials) or "$^", text)
        return [i for piece in pieces if piece for i in ([self.ids[piece]] if piece in self.ids else piece.encode())]

    def write(self, grammar: str, seed: int) -> str:
        draws, matcher = random.Random(seed), self._vocabulary.matcher(grammar)
        written: list[int] = []
        mask = np.zeros(num_words(self.vocab_size), dtype=np.int32)
        while len(written) < 6000:
            may_end = matcher.fill(mask)
            token_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if may_end and (not token_ids or draws.random() < 0.03 or len(written) > 300):
                return b"".join(map(self.token_bytes, written)).decode()
            liking = 0.9 if len(written) > 150 else 0.2
            specials = [token_id for token_id in token_ids if token_id > 255]
            marks = draws.sample(self._marks, len(self._marks))
            if specials and draws.random() < liking:
                taken = [draws.choice(specials)]
            elif draws.random() < liking and (fitting := [mark for mark in marks if self._fits(matcher, mark)]):
                taken = fitting[0]
            else:
                taken = [draws.choice([token_id for token_id in token_ids if 31 < token_id < 127] or token_ids)]
            matcher.accept(taken)
            written += taken
        raise AssertionError(b"".join(map(self.token_bytes, written)).decode()[:500])

    def num_tokens_taken(self, grammar: str, token_ids: Sequence[int]) -> int:
        return self._vocabulary.matcher(grammar).num_valid(token_ids)

    def num_chars_taken(self, grammar: str, text: str) -> int:
        """All of them only where the answer may end there."""
        matcher, token_ids = self._vocabulary.matcher(grammar), self.token_ids(text)
        num_valid = matcher.num_valid(token_ids)
        if num_valid == len(token_ids):
            matcher.accept(token_ids)
            may_end = matcher.fill(np.zeros(num_words(self.vocab_size), dtype=np.int32))
            return len(text) if may_end else len(text) - 1
        return len(b"".join(map(self.token_bytes, token_ids[:num_valid])).decode(errors="ignore"))

    def _fits(self, matcher: Any, mark: list[int]) -> bool:
        return bool(matcher.num_valid(mark) == len(mark))


def texts_in(described: Any) -> Iterator[str]:
    if isinstance(described, str):
        yield described
    elif isinstance(described, tuple):
        for each in described:
            yield from texts_in(each)
    elif is_dataclass(described):
        for part in fields(described):
            if part.name != "shown_by":
                yield from texts_in(getattr(described, part.name))


def read(name: str, text: str, schemas: Mapping[str, Any] = SCHEMAS) -> list[Event]:
    parser = AnswerParser(FORMATS[name], None, tools=schemas, is_thinking=False, is_held=True)
    return joined([*parser.feed(text), *parser.finish(is_cut=False)])


def check_calls(events: Sequence[Event]) -> int:
    """How many there are, all whole and valid."""
    names = [event.name for event in events if isinstance(event, CallBegun)]
    arguments = [event.text for event in events if isinstance(event, Arguments)]
    assert len(names) == len(arguments) == sum(isinstance(event, CallEnded) for event in events)
    for name, text in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    return len(names)


@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_is_one_that_can_be_read(name: str) -> None:
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], TOOLS, is_required=True, is_parallel=True, special_ids=model.ids)
    for seed in range(3):
        text = model.write(grammar, seed)
        events = read(name, text)
        assert check_calls(events) >= 1, text
        assert not any(isinstance(event, Content) for event in events), text


@pytest.mark.parametrize("name", NAMES)
def test_calls_among_text_follow_their_schemas(name: str) -> None:
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], TOOLS, is_required=False, is_parallel=True, special_ids=model.ids)
    counts = [check_calls(read(name, model.write(grammar, seed))) for seed in range(5)]
    alone = calls_grammar(FORMATS[name], TOOLS, is_required=False, is_parallel=False, special_ids=model.ids)
    counts_alone = [check_calls(read(name, model.write(alone, seed))) for seed in range(2)]
    assert max(counts) >= 1 or FORMATS[name] in BARE
    assert max(counts_alone) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_single_call_is_one(name: str) -> None:
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], TOOLS[:1], is_required=True, is_parallel=False, special_ids=model.ids)
    events = read(name, model.write(grammar, 0))
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["weather"]
    assert check_calls(events) == 1


CANONICAL = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=exact>\nTrue\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
        "</seed:tool_call>"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}'),
    ("pythonic", "[weather(city='Oslo', exact=True), now()]"),
    ("olmo3", '<function_calls>weather(city="Oslo")\nnow()</function_calls>'),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}'),
    ("deepseek_v31", f'<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>weather<{BAR}tool▁sep{BAR}>'
        f'{{"city": "Oslo"}}<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>'),
    ("deepseek_v3", f'<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>now\n'
        f'```json\n{{}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>'),
    ("deepseek_v32", f'<{BAR}DSML{BAR}function_calls>\n<{BAR}DSML{BAR}invoke name="weather">\n'
        f'<{BAR}DSML{BAR}parameter name="city" string="true">Oslo</{BAR}DSML{BAR}parameter>\n'
        f'<{BAR}DSML{BAR}parameter name="exact" string="false">true</{BAR}DSML{BAR}parameter>\n'
        f"</{BAR}DSML{BAR}invoke>\n</{BAR}DSML{BAR}function_calls>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,exact:true}<tool_call|>'),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>"),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
        "</invoke>\n</minimax:tool_call>"),
    ("json", '[{"name": "weather", "arguments": {"city": "Oslo"}}]'),
    ("openai", '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), CANONICAL, ids=[name for name, _ in CANONICAL])
def test_a_grammar_takes_what_models_write_of_themselves(name: str, text: str) -> None:
    properties = {"city": {"type": "string"}, "exact": {"type": "boolean"}}
    weather = {"type": "object", "properties": properties, "required": ["city"]}
    tools = [CallableTool("weather", weather, is_strict=True), CallableTool("now", {"type": "object"}, is_strict=True)]
    model = Model(SPECIAL.get(name, ()), name)
    for is_required in (True, False):
        grammar = calls_grammar(FORMATS[name], tools, is_required=is_required, is_parallel=True, special_ids=model.ids)
        assert model.num_chars_taken(grammar, text) == len(text)
        other = text.replace("city", "town").replace("now", "then")
        assert model.num_chars_taken(grammar, other) < len(other)


def test_properties_stand_in_the_order_that_the_model_has_learnt() -> None:
    tools = strict(town={"type": "string"}, Area={"type": "integer"})
    for name, text in (
        ("gemma4", '<|tool_call>call:weather{Area:1,town:<|"|>Oslo<|"|>}<tool_call|>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"town": "Oslo", "Area": 1}}</tool_call>'),
    ):
        model = Model(SPECIAL.get(name, ()), name)
        grammar = calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=True, special_ids=model.ids)
        assert model.num_chars_taken(grammar, text) == len(text)


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "hermes", "qwen3_coder"])
def test_a_tool_may_have_many_properties_that_may_be_left_out(name: str) -> None:
    properties = {f"p{number:03}": {"type": "integer"} for number in range(200)}
    tools = [CallableTool("weather", {"type": "object", "properties": properties}, is_strict=True)]
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=False, special_ids=model.ids)
    texts = {
        "gemma4": "<|tool_call>call:weather{p003:1,p150:2}<tool_call|>",
        "pythonic": "[weather(p003=1, p150=2)]",
        "hermes": '<tool_call>{"name": "weather", "arguments": {"p003": 1, "p150": 2}}</tool_call>',
        "qwen3_coder": "<tool_call><function=weather><parameter=p003>\n1\n</parameter><parameter=p150>\n2\n</parameter>"
        "</function></tool_call>",
    }
    assert model.num_chars_taken(grammar, texts[name]) == len(texts[name])
    assert model.num_chars_taken(grammar, texts[name].replace("p003", "p200")) < len(texts[name])


@pytest.mark.parametrize("name", ["gemma4", "qwen3_coder", "glm45"])
def test_texts_without_quotes_follow_lengths_and_patterns(name: str) -> None:
    properties = {
        "a": {"anyOf": [{"type": "string", "minLength": 5, "maxLength": 9000}, {"type": "null"}]},
        "b": {"type": "string", "pattern": "/x$"},
    }
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    tools = [CallableTool("weather", schema, is_strict=True)]
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=False, special_ids=model.ids)
    template = {
        "gemma4": '<|tool_call>call:weather{a:<|"|>A<|"|>,b:<|"|>B<|"|>}<tool_call|>',
        "qwen3_coder": "<tool_call><function=weather><parameter=a>\nA\n</parameter><parameter=b>\nB\n</parameter>"
        "</function></tool_call>",
        "glm45": "<tool_call>weather<arg_key>a</arg_key><arg_value>A</arg_value><arg_key>b</arg_key>"
        "<arg_value>B</arg_value></tool_call>",
    }[name]
    for a, b, is_taken in (
        ("xxxxx", "/x", True),
        ("null", "/x", True),
        ("xxxx", "/x", False),
        ("xxxx\n</parameter>xxxx", "/x", name != "qwen3_coder"),
        ("y" * 9001, "/x", False),
        ("xxxxx", "x", False),
    ):
        text = template.replace("A", a).replace("B", b)
        if (name, a) != ("gemma4", "null"):
            assert (model.num_chars_taken(grammar, text) == len(text)) == is_taken


def test_a_text_does_not_spell_the_token_that_ends_it() -> None:
    model = Model(SPECIAL["glm45"], "glm45")
    grammar = calls_grammar(
        FORMATS["glm45"], strict(a={"type": "string"}), is_required=True, is_parallel=False, special_ids=model.ids
    )
    begun = model.token_ids("<tool_call>weather<arg_key>a</arg_key><arg_value>b")
    assert model.num_tokens_taken(grammar, [*begun, *b"</arg_value"]) == len(begun) + len("</arg_value")
    assert model.num_tokens_taken(grammar, [*begun, *b"</arg_value>"]) == len(begun) + len("</arg_value")


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "hermes", "qwen3_coder"])
def test_odd_names_of_properties_can_be_read(name: str) -> None:
    schema = {"type": "object", "properties": {"a b": {"type": "integer"}, 'c"d': {"type": "integer"}}}
    tools = [CallableTool("weather", schema | {"required": ["a b", 'c"d']}, is_strict=True)]
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=False, special_ids=model.ids)
    (arguments,) = [event for event in read(name, model.write(grammar, 1)) if isinstance(event, Arguments)]
    assert set(json.loads(arguments.text)) == {"a b", 'c"d'}


MALFORMED: list[Any] = [
    3, [], "x", {"type": 3}, {"type": "nothing"}, {"enum": 5}, {"anyOf": 3}, {"anyOf": [3]}, {"oneOf": {}},
    {"allOf": 3},
    {"type": "array", "items": 3}, {"type": "array", "minItems": "x"}, {"type": "string", "minLength": "x"},
    {"type": "string", "pattern": 3}, {"type": "string", "pattern": "("}, {"type": "object", "properties": []},
    {"type": "object", "required": 3}, {"$ref": 3}, {"$ref": "#/nowhere"}, {"$ref": "#"}, {"const": {"a": [None, 1.5]}},
    {"type": "integer", "minimum": "x"}, {"format": 3}, {"type": "string", "format": []}, {"enum": []},
]  # fmt: skip


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("name", ["hermes", "gemma4", "pythonic", "qwen3_coder", "deepseek_v32"])
def test_a_malformed_schema_is_refused_or_means_nothing_more(name: str, is_strict: bool) -> None:
    model = Model(SPECIAL.get(name, ()), name)
    wholes = [*MALFORMED, *({"type": "object", "properties": {"p": each}} for each in MALFORMED)]
    for schema in wholes:
        tools = [CallableTool("weather", schema, is_strict=is_strict)]
        with suppress(GrammarError):  # and nothing else
            model.num_chars_taken(
                calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=True, special_ids=model.ids), "x"
            )


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "qwen3_coder"])
def test_what_says_nothing_more_is_no_reason_to_refuse(name: str) -> None:
    tools = strict(
        one={"allOf": [{"type": "integer"}]},
        other={"type": "integer", "pattern": "a", "required": ["x"]},
        listed={"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]},
        some={"type": "array", "items": {"type": "integer"}, "additionalItems": False},
        mixed={"type": "string", "enum": ["a", 1]},
        never=False,
    )
    model = Model(SPECIAL.get(name, ()), name)
    grammar = calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=True, special_ids=model.ids)
    for seed in range(4):
        for event in read(name, model.write(grammar, seed), {"weather": tools[0].parameters}):
            if isinstance(event, Arguments):
                jsonschema.validate(json.loads(event.text), tools[0].parameters)


def test_a_name_that_marks_would_cut_is_refused() -> None:
    tools = [CallableTool("weather", {"properties": {"a>b": {}}}, is_strict=False)]
    with pytest.raises(GrammarError, match="'a>b'"):
        calls_grammar(FORMATS["qwen3_coder"], tools, is_required=True, is_parallel=True, special_ids={})


def strict(**properties: Any) -> list[CallableTool]:
    return [CallableTool("weather", {"type": "object", "properties": properties}, is_strict=True)]


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("hermes", {"type": "array", "uniqueItems": True}, "'weather': 'uniqueItems' at /properties/p"),
        ("qwen3_coder", {"type": "array", "uniqueItems": True}, "'weather': 'uniqueItems' at the top"),
        ("qwen3_coder", {"type": "string", "format": "date", "maxLength": 9}, "'format' at /properties/p"),
        ("qwen3_coder", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, "'minimum' at /prop"),
        ("glm45", {"type": "string", "pattern": "^$|^a"}, "'pattern' at /properties/p"),
        ("gemma4", {"type": "object", "patternProperties": {}}, "'patternProperties' at /properties/p"),
        ("gemma4", {"items": {"oneOf": [{"type": "string"}, {"minLength": 2}]}, "type": "array"}, "'oneOf' at /prop"),
        ("pythonic", {"allOf": []}, "'allOf' at /properties/p"),
        ("qwen3_coder", {"$ref": "#/$defs/list", "maxItems": 1}, "'maxItems' at /properties/p"),
        ("gemma4", {"$ref": "http://example.com/other"}, "a reference leads nowhere"),
        ("pythonic", {"type": "array", "items": [{"type": "string"}]}, "'items' at /properties/p"),
        ("openai", {"not": {}, "contains": {}, "minContains": 2}, "'contains' at /properties/p"),
    ],
)
def test_what_cannot_be_promised_of_a_strict_tool_is_refused(name: str, schema: Any, words: str) -> None:
    tools = strict(p=schema)
    with pytest.raises(GrammarError, match=words):
        calls_grammar(FORMATS[name], tools, is_required=True, is_parallel=True, special_ids={})
    loose = [replace(tool, is_strict=False) for tool in tools]
    model = Model(SPECIAL.get(name, ()), name)
    calls_grammar(FORMATS[name], loose, is_required=True, is_parallel=True, special_ids=model.ids)
