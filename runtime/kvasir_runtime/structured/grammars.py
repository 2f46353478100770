"""Grammars of what clients ask for, as text that llguidance reads."""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import json_schema_grammar

MAX_CHOICES = 4096


def json_object_grammar(*, any_whitespace: bool = True) -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"}, any_whitespace=any_whitespace)


def regex_grammar(regex: str) -> str:
    """The whole answer matches. Raises GrammarError."""
    if "\0" in regex:
        raise GrammarError("a regular expression holds no NUL")
    return llguidance.LLMatcher.grammar_from_regex(regex)


def regex_within(regex: str) -> str:
    """The same, as it stands in a longer one between Lark's slashes. Raises GrammarError."""
    if regex.startswith("^"):
        regex = regex[1:]
    if regex.endswith("$") and not regex.endswith("\\$"):
        regex = regex[:-1]
    grammar = regex_grammar(regex)
    fault = llguidance.LLMatcher.validate_grammar(grammar)
    if fault:
        raise GrammarError(fault)
    written: str = json.loads(grammar)["grammars"][0]["lark_grammar"]
    return f"(?:{written.removeprefix('start: /').removesuffix('/')})"


def choice_grammar(choices: Sequence[str]) -> str:
    """The answer is one of them. Raises GrammarError."""
    if not choices or len(choices) > MAX_CHOICES or "" in choices:
        raise GrammarError(f"1 to {MAX_CHOICES} choices are possible, none of them empty, but {len(choices)} came")
    return llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def ebnf_grammar(text: str) -> str:
    """Of EBNF as llama.cpp and xgrammar write it (`root ::= ...`), or of Lark (`start: ...`). Raises GrammarError."""
    if "::=" not in text:
        return llguidance.LLMatcher.grammar_from_lark(text)
    try:
        return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # of one or another class, as the fault is
        raise GrammarError(f"the grammar cannot be read: {error}") from error


def either(one: str, other: str) -> str:
    """The answer follows one of two grammars."""
    (first, first_parts), (second, second_parts) = named_parts("one", one), named_parts("other", other)
    return composed(f"start: {first} | {second}", [*first_parts, *second_parts])


def composed(lark: str, parts: Sequence[dict[str, Any]]) -> str:
    """A grammar that refers to others."""
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *parts]}, ensure_ascii=False)


def named_parts(name: str, grammar: str) -> tuple[str, list[dict[str, Any]]]:
    """How Lark refers to a grammar, and the grammars that it is made of. Lark's text is the only part of its own."""
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    name = f"{name}{len(parts)}"  # which those within have not
    return f"@{name}", [parts[0] | {"name": name}, *parts[1:]]
