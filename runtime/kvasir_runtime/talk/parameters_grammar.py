"""Grammars of parameters between marks: values without quotes, so no value has what would be taken for its end."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvasir_runtime.structured.negation import CHECKED
from kvasir_runtime.talk.format import Parameters
from kvasir_runtime.talk.lark import ANY_TEXT, LarkGrammar, escaped_regex, not_having, one_of
from kvasir_runtime.talk.schemas import ArgumentsSchema, named_properties, required_of

KEY: Final = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_BARE_SLASH: Final = re.compile(r"(?<!\\)/")
_SLASH: Final = r"\\/"
_PYTHON_WORDS: Final = (("boolean", "True"), ("boolean", "False"), ("null", "None"))
_TEXT_KEYWORDS: Final = ("type", "pattern", "minLength", "maxLength")


class ParametersGrammar:
    """Of one tool. `call_closed`: marks at the call's end."""

    def __init__(
        self,
        grammar: LarkGrammar,
        parameters: Parameters,
        schema: ArgumentsSchema,
        call_closed: Sequence[str],
    ) -> None:
        self._grammar = grammar
        self._parameters = parameters
        self._schema = schema
        self._properties = named_properties(schema.top)
        self._newline = "\n" if parameters.has_newlines else ""
        self._end = self._newline + parameters.value_closed[0]
        self._misleading = self._mistaken_for_ends(call_closed)

    def rule(self) -> str:
        """Properties stand in their order. Raises GrammarError."""
        required = required_of(self._schema.top)
        rules = [
            self._grammar.rule(self._parameter(name, schema)) + ("" if name in required else "?")
            for name, schema in self._properties.items()
        ]
        if not rules and self._schema.top.get("additionalProperties", True) is True:
            rules = [
                f"({self._begun(self._grammar.terminal(KEY), is_text=True)} {self._text()} {self._grammar.space()})*"
            ]
        return " ".join(rules)

    def _parameter(self, name: str, schema: Any) -> str:
        schema = self._schema.referred(schema)
        types = self._schema.types_of(schema)
        is_text = not types or "string" in types
        begun = self._begun(self._grammar.text(name), is_text=is_text)
        if is_text:
            value = self._text(self._matching(schema, types, f"/properties/{name}"))
        else:
            value = f"{self._json(schema)} {self._grammar.text(self._end)}"
        return f"{begun} {value} {self._grammar.space()}"

    def _begun(self, key: str, *, is_text: bool) -> str:
        parameters = self._parameters
        closed = (parameters.string_key_closed if is_text else parameters.json_key_closed) or parameters.key_closed
        parts = [self._grammar.text(parameters.key_opened[0]), key, self._grammar.text(closed[0])]
        if parameters.value_opened:
            parts += [self._grammar.space(), self._grammar.text(parameters.value_opened[0])]
        return " ".join([*parts, self._grammar.text(self._newline)])

    def _text(self, matching: Sequence[str] = ()) -> str:
        return self._grammar.text_until(self._end, without=self._misleading, matching=matching)

    def _json(self, schema: Any) -> str:
        types = self._schema.types_of(schema)
        written = self._grammar.json(
            self._schema.alone(schema), None if self._schema.is_strict else {"type": sorted(types)}
        )
        words = [word for name, word in _PYTHON_WORDS if name in types] if self._parameters.has_python_words else []
        if not words or (isinstance(schema, Mapping) and CHECKED & schema.keys() - {"type", "anyOf", "oneOf"}):
            return written
        return self._grammar.rule(one_of([written, *map(self._grammar.text, words)]))

    def _mistaken_for_ends(self, call_closed: Sequence[str]) -> list[str]:
        """Regular expressions, simple ones: of others each token costs too much."""
        marks = filter(self._grammar.may_be_in_text, [*self._parameters.key_opened, *call_closed])
        closings = filter(self._grammar.may_be_in_text, self._parameters.value_closed if self._newline else ())
        return [*not_having(list(marks)), *(r"[^\n]" + escaped_regex(mark) for mark in closings)]

    def _matching(self, schema: Any, types: frozenset[str], place: str) -> list[str]:
        """Regular expressions of all that the text may be."""
        spellings = self._spellings(schema)
        if spellings is not None:
            return ["(?:" + "|".join(map(escaped_regex, spellings)) + ")"]
        if types <= {"string"}:
            self._schema.check(schema, _TEXT_KEYWORDS, place)
            return text_regexes(schema)
        self._check_types_alone(schema, place)
        return []

    def _spellings(self, schema: Any) -> list[str] | None:
        """Of values that are listed, and of null. None: there may be others."""
        schema = self._schema.referred(schema)
        if not isinstance(schema, Mapping):
            return None
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return [value if isinstance(value, str) else json.dumps(value) for value in values]
        if schema.get("type") == "null":
            return ["null"]
        branches = schema.get("anyOf", schema.get("oneOf"))
        found = [self._spellings(branch) for branch in branches] if isinstance(branches, list) else [None]
        return None if None in found else [text for texts in found for text in texts or ()]

    def _check_types_alone(self, schema: Any, place: str) -> None:
        """Text that is read as another type where it can be follows no other keyword of that type."""
        schema = self._schema.referred(schema)
        self._schema.check(schema, ("type", "anyOf", "oneOf"), place)
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword) if isinstance(schema, Mapping) else None
            for number, branch in enumerate(branches if isinstance(branches, list) else ()):
                self._check_types_alone(branch, f"{place}/{keyword}/{number}")


def text_regexes(schema: Any) -> list[str]:
    """Of a string's text, as Lark has them."""
    if not isinstance(schema, Mapping):
        return []
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
    found = [f"(?s:.{{{shortest},{longest}}})"] if shortest or longest != "" else []
    if isinstance(pattern := schema.get("pattern"), str):
        found.append(_whole(pattern))
    return found


def _whole(pattern: str) -> str:
    """A pattern that is found somewhere, as a regular expression of the whole."""
    begun = "" if pattern.startswith("^") else ANY_TEXT
    is_ended = pattern.endswith("$") and not pattern.endswith(r"\$")
    bare = pattern.removeprefix("^").removesuffix("$") if is_ended else pattern.removeprefix("^")
    return f"{begun}(?:{_BARE_SLASH.sub(_SLASH, bare)}){'' if is_ended else ANY_TEXT}"
