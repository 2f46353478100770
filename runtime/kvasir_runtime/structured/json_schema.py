"""JSON Schemas as llguidance can promise them, and no weaker: keywords that it lacks are written in others where that
is exact; else the schema is refused, with the keyword and its place.

White space and the order of properties follow the schema: a comma or colon may be followed by white space, in bounds.
"""

import itertools
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import llguidance

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.negation import (
    FORMATS,
    TYPES,
    NotExpressibleError,
    Schema,
    are_disjoint,
    listed_values,
    negated,
    types_of,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there for type checkers alone

WHITE_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
MAX_DEPTH: Final = 128
MAX_REFS: Final = 32
"""Of references to references."""
REFUSED: Final = {
    "contains": "arrays that must hold something",
    "uniqueItems": "arrays without equal items",
    "unevaluatedProperties": "properties that no other keyword speaks of",
    "unevaluatedItems": "items that no other keyword speaks of",
    "$dynamicRef": "references that depend on who refers",
    "$recursiveRef": "references that depend on who refers",
    "extends": "keywords of draft 3",
    "disallow": "keywords of draft 3",
    "divisibleBy": "keywords of draft 3",
}
MAX_UNIQUE_ARRAYS: Final = 400
"""Enough for those of five values."""
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "prefixItems")
_SINGLE: Final = ("additionalProperties", "additionalItems", "propertyNames")
_REF_ALONE: Final = ("draft-03", "draft-04", "draft-06", "draft-07")
"""In these drafts nothing beside `$ref` counts."""


class UnsupportedKeywordError(GrammarError):
    """No backend can promise what a keyword asks."""

    def __init__(self, keyword: str, place: str, why: str) -> None:
        super().__init__(f"{keyword!r} at {place or 'the top'} of the schema cannot be promised: {why}")


def json_schema_grammar(schema: Any, *, any_whitespace: bool = True) -> str:
    """Raises GrammarError."""
    options: JsonCompileOptions = {"whitespace_flexible": any_whitespace}
    if any_whitespace:
        options["whitespace_pattern"] = WHITE_SPACE
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(promisable(schema)), overrides=options)


def promisable(schema: Any) -> dict[str, Any]:
    """The same schema in llguidance's keywords. Raises GrammarError."""
    try:
        rewritten = _Rewriting(schema).schema(schema, "", 0)
    except (TypeError, AttributeError, LookupError, ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is malformed, a keyword has a value of the wrong kind: {error}") from error
    if rewritten is False:
        raise GrammarError("the schema is false: no answer follows it")
    return {} if rewritten is True else rewritten


class _Rewriting:
    def __init__(self, root: Any) -> None:
        self._root = root
        draft = root.get("$schema", "") if isinstance(root, dict) else ""
        self._ref_alone = isinstance(draft, str) and any(each in draft for each in _REF_ALONE)

    def schema(self, schema: Any, place: str, depth: int) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(
                f"a schema is an object or a boolean, but at {place or 'the top'} stands {schema!r:.100}"
            )
        if depth > MAX_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_DEPTH} levels")
        if "$ref" in schema and self._ref_alone:
            schema = {name: schema[name] for name in ("$ref", "$schema", "$defs", "definitions") if name in schema}
        rewritten = dict(self._kept(schema, place, depth))
        together = [*self._one_of(schema, place, depth), *self._conditions(schema, place, depth)]
        together += self._dependencies(schema, place, depth)
        unique = [] if _is_vacuous("uniqueItems", schema) else self._unique_arrays(schema)
        if unique:
            together.append({"anyOf": [{"type": [each for each in TYPES if each != "array"]}, {"enum": unique}]})
        if together:
            rewritten["allOf"] = [*rewritten.get("allOf", []), *together]
        return rewritten

    def _kept(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[tuple[str, Any]]:
        """Keywords that stay."""
        for name, value in schema.items():
            here = f"{place}/{name}"
            if name in _MAPS and isinstance(value, dict):
                yield name, {key: self.schema(each, f"{here}/{key}", depth + 1) for key, each in value.items()}
            elif name in _LISTS or (name == "items" and isinstance(value, list)):
                yield name, [self.schema(each, f"{here}/{n}", depth + 1) for n, each in enumerate(_list(value, here))]
            elif name in _SINGLE or name == "items":
                yield name, self.schema(value, here, depth + 1)
            elif name == "format":
                if value in FORMATS:
                    yield name, value
            elif name in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
                if value and (bound := name.replace("exclusiveM", "m")) in schema:  # draft 4
                    yield name, schema[bound]
            elif name in REFUSED:
                if not _is_vacuous(name, schema) and not (name == "uniqueItems" and self._unique_arrays(schema)):
                    raise UnsupportedKeywordError(name, place, f"{REFUSED[name]}; leave it out and check the answer")
            elif name not in _REWRITTEN:
                yield name, value

    def _one_of(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        if "oneOf" not in schema:
            return
        here, given = f"{place}/oneOf", _list(schema["oneOf"], f"{place}/oneOf")
        outer = {"type": schema["type"]} if "type" in schema else {}
        typed = [outer | each if isinstance(each, dict) and "$ref" not in each else each for each in given]
        alternatives: list[Schema] = []
        for number, branch in enumerate(given):
            others = [each for other, each in enumerate(typed) if other != number]
            rivals = [each for each in others if not self._are_disjoint(typed[number], each)]
            opposites = [self._negated(each, "oneOf", place, depth) for each in rivals]
            own = self.schema(branch, f"{here}/{number}", depth + 1)
            alternatives.append({"allOf": [own, *opposites]} if opposites else own)
        yield {"anyOf": alternatives}

    def _unique_arrays(self, schema: dict[str, Any]) -> list[list[Any]]:
        """All that `uniqueItems` allows where items are listed; empty: they are not, or that would be too many."""
        items = schema.get("items")
        if not schema.get("uniqueItems") or not isinstance(items, dict) or "prefixItems" in schema:
            return []
        try:
            values = listed_values(self._resolved(items))
        except NotExpressibleError:
            return []
        most = min(len(values), int(schema.get("maxItems", len(values))))
        totals = itertools.accumulate(math.perm(len(values), number) for number in range(most + 1))
        if any(total > MAX_UNIQUE_ARRAYS for total in totals):
            return []
        return [list(each) for number in range(most + 1) for each in itertools.permutations(values, number)]

    def _conditions(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        if "not" in schema:
            yield self._negated(schema["not"], "not", place, depth)
        if "if" in schema and ("then" in schema or "else" in schema):
            condition, then, otherwise = (
                self.schema(schema.get(name, True), f"{place}/{name}", depth + 1) for name in ("if", "then", "else")
            )
            opposite = self._negated(schema["if"], "if", place, depth)
            yield {"anyOf": [{"allOf": [condition, then]}, {"allOf": [opposite, otherwise]}]}

    def _dependencies(self, schema: dict[str, Any], place: str, depth: int) -> Iterator[Schema]:
        for keyword in _DEPENDENCIES:
            for name, wanted in schema.get(keyword, {}).items():
                if isinstance(wanted, list):
                    then: Schema = {"required": wanted}
                else:
                    then = self.schema(wanted, f"{place}/{keyword}/{name}", depth + 1)
                yield {"anyOf": [{"properties": {name: False}}, then]}

    def _negated(self, schema: Schema, keyword: str, place: str, depth: int) -> Schema:
        try:
            return self.schema(negated(schema, self._resolved), place, depth + 1)
        except NotExpressibleError as error:
            raise UnsupportedKeywordError(keyword, place, f"it needs the opposite of {error}") from error

    def _are_disjoint(self, one: Schema, other: Schema) -> bool:
        try:
            return are_disjoint(one, other, self._resolved)
        except NotExpressibleError:
            return False

    def _resolved(self, schema: Schema) -> Schema:
        """Of references that stand alone."""
        for _ in range(MAX_REFS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if any(name in schema for name in ("type", "properties", "required", "allOf", "anyOf", "enum", "const")):
                raise NotExpressibleError("$ref beside others")
            schema = self._target(schema["$ref"])
        raise NotExpressibleError("a reference to itself")

    def _target(self, ref: str) -> Schema:
        if not ref.startswith("#"):
            raise NotExpressibleError(f"a reference to another document, {ref!r}")
        found = self._root
        for step in ref[1:].strip("/").split("/") if ref not in ("#", "#/") else ():
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise NotExpressibleError(f"a reference to nothing, {ref!r}") from error
        target: Schema = found
        return target


_OF_TYPE: Final = {"unevaluatedProperties": "object"} | dict.fromkeys(
    ("contains", "uniqueItems", "unevaluatedItems"), "array"
)
_DEPENDENCIES: Final = ("dependencies", "dependentRequired", "dependentSchemas")
_REWRITTEN: Final = ("oneOf", "not", "if", "then", "else", *_DEPENDENCIES, "minContains", "maxContains")
"""In other keywords; the last two go with `contains`."""


def _list(value: Any, place: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise GrammarError(f"at {place} of the schema a list was expected, but there is {value!r:.100}")


def _is_vacuous(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether the keyword asks for nothing."""
    if keyword in _OF_TYPE and _OF_TYPE[keyword] not in types_of(schema):
        return True
    match keyword:
        case "uniqueItems":
            return not schema.get(keyword) or schema.get("maxItems", 2) <= 1
        case "contains":
            return bool(schema.get("minContains") == 0 and "maxContains" not in schema)
        case "unevaluatedProperties" | "unevaluatedItems":
            return schema[keyword] is True
    return False
