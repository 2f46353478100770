"""Grammars of parameters between marks: values without quotes, which end where their mark first stands."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import UnsupportedKeywordError
from kvasir_runtime.structured.negation import CHECKED
from kvasir_runtime.talk.format import Parameters
from kvasir_runtime.talk.lark import LarkGrammar, one_of
from kvasir_runtime.talk.schemas import ALL_TYPES, ArgumentsSchema, listed_values, named_properties, required_of

KEY: Final = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_PYTHON_WORDS: Final = (("boolean", "True"), ("boolean", "False"), ("null", "None"))
_TEXT_KEYWORDS: Final = ("type", "pattern", "minLength", "maxLength", "format")


class ParametersGrammar:
    """Of one tool."""

    def __init__(self, grammar: LarkGrammar, parameters: Parameters, schema: ArgumentsSchema) -> None:
        self._grammar = grammar
        self._parameters = parameters
        self._schema = schema
        self._properties = named_properties(schema.top)
        self._newline = "\n" if parameters.has_newlines else ""
        self._end = self._newline + parameters.value_closed[0]
        self._is_end_text = grammar.may_be_in_text(self._end)

    def rule(self) -> str:
        """Properties stand in their order. Raises GrammarError."""
        required = required_of(self._schema.top)
        rules = [
            self._grammar.rule(self._parameter(name, schema)) + ("" if name in required else "?")
            for name, schema in self._properties.items()
        ]
        if not rules and self._schema.top.get("additionalProperties", True) is True:
            rules = [
                f"({self._begun(self._grammar.terminal(KEY), is_text=True)} {self._grammar.text_until(self._end)} "
                f"{self._grammar.space()})*"
            ]
        return " ".join(rules)

    def _parameter(self, name: str, schema: Any) -> str:
        closings = [
            *self._parameters.key_closed,
            *self._parameters.string_key_closed,
            *self._parameters.json_key_closed,
        ]
        if name != name.strip() or any(mark in name for mark in closings):
            raise GrammarError(f"the property {name!r}: this model cannot write the name, since a mark would end it")
        place = f"/properties/{name}"
        schema = self._schema.referred(schema, place)
        types = self._schema.types_of(schema)
        is_text = not types or "string" in types
        begun = self._begun(self._grammar.text(name), is_text=is_text)
        if is_text:
            value = self._text(schema, types, place)
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

    def _text(self, schema: Any, types: frozenset[str], place: str) -> str:
        spellings = self._spellings(schema, place)
        if spellings is not None:
            return self._grammar.rule(one_of(self._grammar.text(text + self._end) for text in spellings))
        string = self._string_part(schema, place)
        if string is None:
            self._check_types_alone(schema, place)
            return self._grammar.text_until(self._end)
        self._schema.check(string, _TEXT_KEYWORDS, place)
        rule = self._schema.text_rule(string, place)
        if rule is not None and rule.has_length and rule.has_regex and self._is_end_text:
            if self._schema.is_strict:
                keyword = "pattern" if rule.pattern is not None else "format"
                raise UnsupportedKeywordError(keyword, place, "beside a length it takes too much work at every token")
            rule = replace(rule, min_length=0, max_length=None)
        if rule is not None:
            rule = replace(rule, or_null="null" in types)
        return self._grammar.text_until(self._end, rule=rule)

    def _json(self, schema: Any) -> str:
        types = self._schema.types_of(schema)
        any_of_types = {"type": sorted(types & {*ALL_TYPES}) or list(ALL_TYPES)}
        written = self._grammar.json(self._schema.alone(schema), None if self._schema.is_strict else any_of_types)
        words = [word for name, word in _PYTHON_WORDS if name in types] if self._parameters.has_python_words else []
        if not words or (isinstance(schema, Mapping) and CHECKED & schema.keys() - {"type", "anyOf", "oneOf"}):
            return written
        return self._grammar.rule(one_of([written, *map(self._grammar.text, words)]))

    def _string_part(self, schema: Any, place: str) -> Any:
        """Of a schema of text, or of text or null. None: it is of other types too, or says more."""
        schema = self._schema.referred(schema, place)
        if not self._schema.types_of(schema) <= {"string", "null"}:
            return None
        keywords = {"anyOf", "oneOf"} & schema.keys() if isinstance(schema, Mapping) else ()
        if not keywords:
            return schema
        branches = [branch for keyword in keywords for branch in schema[keyword]]
        strings = [branch for branch in branches if self._schema.types_of(branch) != {"null"}]
        is_alone = len(strings) == 1 and not CHECKED & schema.keys() - keywords - {"type"}
        return self._string_part(strings[0], place) if is_alone else None

    def _spellings(self, schema: Any, place: str) -> list[str] | None:
        """Of values that are listed, and of null. None: there may be others."""
        schema = self._schema.referred(schema, place)
        if not isinstance(schema, Mapping):
            return None
        values = listed_values(schema)
        if values is not None:
            self._schema.check(schema, ("const", "enum", "type"), place)
            return [value if isinstance(value, str) else json.dumps(value) for value in values]
        if schema.get("type") == "null":
            return ["null"]
        branches = schema.get("anyOf", schema.get("oneOf"))
        found = [self._spellings(each, place) for each in branches] if isinstance(branches, list) else [None]
        return None if None in found else [text for texts in found for text in texts or ()]

    def _check_types_alone(self, schema: Any, place: str) -> None:
        """Text that is read as another type where it can be follows no other keyword of that type."""
        schema = self._schema.referred(schema, place)
        self._schema.check(schema, ("type", "anyOf", "oneOf"), place)
        for keyword in ("anyOf", "oneOf"):
            branches = schema.get(keyword) if isinstance(schema, Mapping) else None
            for number, branch in enumerate(branches if isinstance(branches, list) else ()):
                self._check_types_alone(branch, f"{place}/{keyword}/{number}")
