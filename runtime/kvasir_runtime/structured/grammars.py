"""Grammars of what clients ask for, as text that llguidance reads."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model may write before its answer."""

    opened: str
    closed: str
    is_open: bool
    """The prompt has opened it, so it comes first and is closed; else there may be one."""
    special_tokens: Mapping[str, int]
    """Those of the marks."""


def behind_a_thought(grammar: str, thought: Thought) -> str:
    """The same grammar, of what comes after a thought and at most two line ends. Raises GrammarError."""
    closed = _spelled(thought.closed, thought.special_tokens)
    if thought.special_tokens:
        text = f"text: /(?s:.*)/ {closed}"  # no text holds a special token
    else:
        text = f"text[suffix={closed}]: /(?s:.*)/"
    opened = "" if thought.is_open else _spelled(thought.opened, thought.special_tokens)
    whole = "text LINES? @answer" if thought.is_open else f"({opened} text LINES?)? @answer"
    first, *others = _parts(grammar)
    parts = [
        {"name": "whole", "lark_grammar": f"start: {whole}\n{text}\nLINES: /\\n{{1,2}}/\n"},
        first | {"name": "answer"},
        *others,
    ]
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _spelled(mark: str, special_tokens: Mapping[str, int]) -> str:
    """As a Lark grammar has it."""
    if not special_tokens:
        return json.dumps(mark, ensure_ascii=False)
    pieces = re.split(f"({'|'.join(map(re.escape, special_tokens))})", mark)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def _parts(grammar: str) -> list[dict[str, Any]]:
    """Lark's text is the only part of its grammar."""
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts
