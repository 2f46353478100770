"""Grammars of values in another spelling than JSON's."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import UnsupportedKeywordError
from kvasir_runtime.structured.negation import NotExpressibleError, are_disjoint
from kvasir_runtime.talk.format import Values
from kvasir_runtime.talk.lark import LarkGrammar, one_of
from kvasir_runtime.talk.literals import BARE_KEY, KEYWORDS, OBJECT, Brackets, escaped
from kvasir_runtime.talk.parameters_grammar import KEY
from kvasir_runtime.talk.schemas import (
    ALL_TYPES,
    OBJECT_KEYWORDS,
    ArgumentsSchema,
    listed_values,
    named_properties,
    only_branch,
    required_of,
)

MAX_DEPTH: Final = 64
_SINGLE_QUOTED: Final = r"/'([^'\\\x00-\x1f]|\\[\\'nt])*'/"
_KEYWORDS: Final[Mapping[str, Sequence[str]]] = {
    "string": ("type", "pattern", "minLength", "maxLength", "format"),
    "integer": ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "number": ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": ("type",),
    "null": ("type",),
    "array": ("type", "items", "minItems", "maxItems"),
    "object": OBJECT_KEYWORDS,
}


class LiteralsGrammar:
    """Of one tool's arguments."""

    def __init__(self, grammar: LarkGrammar, values: Values, schema: ArgumentsSchema) -> None:
        self._grammar = grammar
        self._literals = values.literals
        self._are_keys_sorted = values.are_keys_sorted
        self._schema = schema

    def rule(self, within: Brackets) -> str:
        """Raises GrammarError."""
        return self._object(self._schema.top, within, "", 0)

    def _value(self, schema: Any, place: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if schema is False:
            raise GrammarError(f"at {place} the schema is false: no value follows it")
        if not isinstance(schema, Mapping):
            return self._any_value()
        if isinstance(reference := schema.get("$ref"), str):
            target = self._schema.referred(schema, place)
            return self._grammar.recursive_rule(
                f"ref {id(self)} {reference}", lambda: self._value(target, place, depth + 1)
            )
        if (branch := only_branch(schema)) is not None:
            return self._value(branch, place, depth + 1)
        return self._grammar.rule(one_of(self._alternatives(schema, place, depth)))

    def _alternatives(self, schema: Mapping[str, Any], place: str, depth: int) -> list[str]:
        values = listed_values(schema)
        if values is not None:
            self._schema.check(schema, ("const", "enum", "type"), place)
            return [self._spelled(value) for value in values]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list):
                is_typed = all(self._is_narrower(branch, schema) for branch in branches)
                self._schema.check(schema, (keyword, "type") if is_typed else (keyword,), place)
                self._check_branches(keyword, branches, place)
                here = f"{place}/{keyword}"
                return [self._value(branch, f"{here}/{n}", depth + 1) for n, branch in enumerate(branches)]
        types = sorted(self._schema.types_of(schema) & {*ALL_TYPES}) or list(ALL_TYPES)
        self._schema.check(schema, [name for each in types for name in _KEYWORDS[each]], place)
        return [self._of_type(each, schema, place, depth) for each in types]

    def _is_narrower(self, branch: Any, schema: Mapping[str, Any]) -> bool:
        """Whether a branch allows no types but those that the schema declares."""
        types = self._schema.types_of(branch)
        return bool(types) and types <= self._schema.types_of({"type": schema.get("type")})

    def _check_branches(self, keyword: str, branches: Sequence[Any], place: str) -> None:
        if keyword != "oneOf" or not self._schema.is_strict:
            return
        try:
            pairs = [(one, other) for number, one in enumerate(branches) for other in branches[:number]]
            if all(
                are_disjoint(one, other, lambda schema: self._schema.referred(schema, place)) for one, other in pairs
            ):
                return
        except NotExpressibleError:
            pass
        raise UnsupportedKeywordError(keyword, place, "its branches may hold for one value together")

    def _of_type(self, name: str, schema: Mapping[str, Any], place: str, depth: int) -> str:
        match name:
            case "boolean":
                return one_of(self._spelled(value) for value in (True, False))
            case "null":
                return self._spelled(None)
            case "array":
                return self._array(schema, place, depth)
            case "object":
                return self._object(schema, OBJECT, place, depth)
            case "string" if self._literals.raw_quotes:
                quote = self._literals.raw_quotes[0]
                rule = self._schema.text_rule(schema, place)
                return f"{self._grammar.text(quote)} {self._grammar.text_until(quote, rule=rule)}"
        known = {keyword: schema[keyword] for keyword in _KEYWORDS[name] if keyword in schema} | {"type": name}
        written = self._grammar.json(known, None if self._schema.is_strict else {"type": name})
        if name == "string" and len(known) == 1 and "'" in self._literals.python_quotes:
            return one_of([written, self._grammar.terminal(_SINGLE_QUOTED)])
        return written

    def _spelled(self, value: Any) -> str:
        """One value, exactly."""
        match value:
            case str() if self._literals.raw_quotes:
                quote = self._literals.raw_quotes[0]
                return self._grammar.text(quote + value + quote)
            case str():
                return self._grammar.text(f'"{escaped(value)}"')
            case None | True | False:
                return self._grammar.text(self._word(json.dumps(value)))
            case list():
                return self._grammar.text("[") + self._parted(map(self._spelled, value)) + self._grammar.text("]")
            case dict():
                keys = [self._grammar.text(self._key(key) + ":") for key in value]
                members = (f"{key} {self._spelled(each)}" for key, each in zip(keys, value.values(), strict=True))
                return self._grammar.text("{") + self._parted(members) + self._grammar.text("}")
        return self._grammar.text(json.dumps(value))

    def _word(self, word: str) -> str:
        """The last spelling is the format's own."""
        return [spelling for spelling, meant in self._literals.words.items() if meant == word][-1]

    def _key(self, name: str, *, is_keyword: bool = False) -> str:
        if (is_keyword or self._literals.raw_quotes) and name and BARE_KEY.fullmatch(name):
            return name
        quote = self._literals.raw_quotes[0] if self._literals.raw_quotes else ""
        return quote + name + quote if quote else f'"{escaped(name)}"'

    def _parted(self, parts: Iterable[str]) -> str:
        return " " + f" {self._comma()} ".join(parts) + " "

    def _comma(self) -> str:
        return f'"," {self._grammar.space()}'

    def _array(self, schema: Mapping[str, Any], place: str, depth: int) -> str:
        item = self._value(schema.get("items", True), f"{place}/items", depth + 1)
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"({self._comma()} {item}){{{max(fewest - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} {more}"
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: Any, brackets: Brackets, place: str, depth: int) -> str:
        properties = named_properties(schema)
        if self._are_keys_sorted:
            properties = dict(sorted(properties.items(), key=lambda item: item[0].lower()))
        separator = brackets.separator or ""
        opened, closed = json.dumps(brackets.opened), json.dumps(brackets.closed)
        if not properties:
            more = schema.get("additionalProperties", True) if isinstance(schema, Mapping) else True
            if more is False or brackets == KEYWORDS:
                return f"{opened} {closed}"
            member = self._any_member(more, separator, place, depth)
            return f"{opened} ({member} ({self._comma()} {member})*)? {closed}"
        members = []
        for name, each in properties.items():
            key = self._grammar.text(self._key(name, is_keyword=brackets == KEYWORDS) + separator)
            space = self._grammar.space() + " " if separator == ":" and not self._literals.raw_quotes else ""
            value = self._value(each, f"{place}/properties/{name}", depth + 1)
            members.append((self._grammar.rule(f"{key} {space}{value}"), name in required_of(schema)))
        return f"{opened} {self._members(members)} {closed}"

    def _any_member(self, schema: Any, separator: str, place: str, depth: int) -> str:
        key = self._grammar.terminal(KEY) if self._literals.raw_quotes else self._grammar.json({"type": "string"})
        value = self._value(schema, f"{place}/additionalProperties", depth + 1)
        return self._grammar.rule(f'{key} "{separator}" {self._grammar.space()} {value}')

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """In their order, with commas between those that are there."""
        first = after = ""
        for member, is_required in reversed(members):
            alone, behind_others = f"{member} {after}", f"{self._comma()} {member} {after}"
            if is_required:
                first, after = self._grammar.rule(alone), self._grammar.rule(behind_others)
            elif first:
                first = self._grammar.rule(one_of([alone, first]))
                after = self._grammar.rule(one_of([behind_others, after]))
            else:
                first, after = f"({alone})?", f"({behind_others})?"
        return first

    def _any_value(self) -> str:
        return self._grammar.recursive_rule(f"any {self._literals.quotes}", self._any_body)

    def _any_body(self) -> str:
        return one_of(self._of_type(name, {}, "", 0) for name in ALL_TYPES)
