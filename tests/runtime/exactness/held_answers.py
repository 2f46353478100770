"""What clients ask of an answer, one of each kind, as the core is given it: its form, calls of tools, thoughts and
their budgets. Each can be followed by a model of random weights."""

from typing import Any

from tests.runtime.exactness.conftest import VOCAB_SIZE, ByteTable

from kvasir_runtime.server.structural_tags import structural_tag_format, structural_tag_grammar
from kvasir_runtime.structured.grammars import (
    choice_grammar,
    ebnf_grammar,
    either,
    json_object_grammar,
    regex_grammar,
)
from kvasir_runtime.structured.json_schema import json_schema_grammar
from kvasir_runtime.structured.thoughts import Thought, behind_a_thought
from kvasir_runtime.talk.formats import FORMATS
from kvasir_runtime.talk.grammar import CallableTool, calls_grammar

END = 300
"""A special token, as the marks are."""
MARKS = {"<tool_call>": 301, "</tool_call>": 302, "<think>": 303, "</think>": 304}
CLOSING = {"logit_bias": {304: 4.0}}
"""So that thoughts end in time."""
MAX_TOKENS = 60
BUDGET = 7

PROMPT = [*b'{"name": "aba", "sizes": [11, 22], "kind": "cow"}']
"""What looks up what came before drafts from it, and is right at times."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 4},
        "kind": {"enum": ["cat", "cow", None]},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TAG = {"format": {"type": "tag", "begin": "<tool_call>", "content": {"type": "json_schema", "json_schema": SCHEMA},
                  "end": "</tool_call>"}}  # fmt: skip
WEATHER, CLOCK = (
    CallableTool(name, {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}}}, is_strict=True)
    for name in ("weather", "clock")
)
REGEX = regex_grammar("(ab|ba|[0-9]{2}){4,20}")
FORM = json_schema_grammar(SCHEMA, any_whitespace=False)


def calls(format_name: str, *tools: CallableTool, is_required: bool = True, is_parallel: bool = True) -> str:
    return calls_grammar(
        FORMATS[format_name], tools, is_required=is_required, is_parallel=is_parallel, special_ids=MARKS
    )


def thinking(
    answer: str | None, *, is_open: bool = True, max_tokens: int | None = None, in_pieces: bool = False
) -> str:
    marks = {} if in_pieces else {mark: MARKS[mark] for mark in ("<think>", "</think>")}
    thought = Thought(opened="<think>", closed="</think>", is_open=is_open, token_ids=marks, max_tokens=max_tokens)
    return behind_a_thought(answer, thought, ByteTable.special_ids)


HELD: dict[str, dict[str, Any]] = {
    "json_schema": {"grammar": FORM},
    "json_object": {"grammar": json_object_grammar()},
    "regex": {"grammar": REGEX, "min_tokens": 30},
    "choice": {"grammar": choice_grammar(["a cat", "a cow", "a cow and a cat", "none of them, which is long"])},
    "ebnf": {"grammar": ebnf_grammar('root ::= part ("+" part){3,9}\npart ::= [a-z]+ | "(" root ")"')},
    "structural tag": {"grammar": structural_tag_grammar(structural_tag_format(TAG, "structural_tag"), MARKS)},
    "tools required": {"grammar": calls("hermes", WEATHER, CLOCK)},
    "tools required, between marks": {"grammar": calls("qwen3_coder", WEATHER, CLOCK)},
    "tool named": {"grammar": calls("hermes", CLOCK, is_parallel=False)},
    "tools auto": {"grammar": calls("hermes", WEATHER, CLOCK, is_required=False), "logit_bias": {301: 4.0, END: 2.0}},
    "schema or calls": {"grammar": either(calls("hermes", WEATHER), FORM)},
    "thought, schema": {"grammar": thinking(FORM)} | CLOSING,
    "thought or none, regex": {"grammar": thinking(REGEX, is_open=False), "logit_bias": {303: 9.0, 304: 4.0}},
    "thought, calls": {"grammar": thinking(calls("hermes", WEATHER))} | CLOSING,
    "budget": {"grammar": thinking(None, max_tokens=BUDGET)},
    "budget, schema": {"grammar": thinking(FORM, max_tokens=BUDGET)},
    "budget in pieces, schema": {"grammar": thinking(FORM, max_tokens=BUDGET, in_pieces=True)},
    "budget in pieces, calls": {
        "grammar": thinking(calls("hermes", WEATHER), is_open=False, max_tokens=BUDGET, in_pieces=True),
        "logit_bias": {ord("<"): 3.0},
    },
}
ASKED = {"max_tokens": MAX_TOKENS, "stop_token_ids": (END,), "repetition_penalty": 1.3}
DRAWN = {"temperature": 0.9, "top_p": 0.95}
SEEDS = (31, 32)
"""Of the drawn ones; a greedy one goes with them."""
assert max(MARKS.values()) < VOCAB_SIZE
