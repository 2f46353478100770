"""What a JSON Schema does not allow, as a schema of its own; and whether two schemas share no value.

llguidance has neither `not` nor `oneOf` nor `if`, but intersections and alternatives: so these become alternatives of
what is left when a keyword fails, wherever that can be written down exactly.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Final

from kvasir_runtime.structured.ecma_regex import RustPattern
from kvasir_runtime.structured.formats import REGEXES

Schema = dict[str, Any] | bool
Resolve = Callable[[Schema], Schema]
"""Follows `$ref`s; raises NotExpressibleError."""

TYPES: Final = ("object", "array", "string", "number", "boolean", "null")
MAX_DEPTH: Final = 16
"""Of opposites within opposites."""
MAX_PAIRS: Final = 20
"""Of branches of a `oneOf` that may hold together, where it is not to hold."""
_SPEAKS_OF: Final = {
    keyword: types
    for types, keywords in {
        frozenset({"object"}): (
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
        ),
        frozenset({"array"}): (
            "items", "additionalItems", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems",
            "unevaluatedItems",
        ),
        frozenset({"string"}): ("pattern", "minLength", "maxLength", "format"),
        frozenset({"integer", "number"}): (
            "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"
        ),
    }.items()
    for keyword in keywords
}  # fmt: skip
"""The types whose values a keyword can refuse."""
CHECKED: Final = frozenset({
    "$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const",
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "format", "if", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties",
    "prefixItems", "properties", "propertyNames", "required", "type", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
})  # fmt: skip
"""Keywords that may fail; all others only describe, or go with one of these."""


class NotExpressibleError(Exception):
    """Its text is what stands in the way."""


def negated(schema: Schema, resolve: Resolve, within: Schema = True, depth: int = 0) -> Schema:
    """Allows exactly what `schema` does not, among what `within` allows. Raises NotExpressibleError."""
    if depth > MAX_DEPTH:
        raise NotExpressibleError("schemas so deep, or that refer to themselves")
    schema = resolve(schema)
    if isinstance(schema, bool):
        return not schema
    scope = _Scope(schema, resolve, within if isinstance(within, dict) else {}, depth)
    failures = [each for keyword in schema if keyword in CHECKED for each in scope.failures(keyword)]
    alternatives = [each for each in failures if each is not False]
    return {"anyOf": alternatives} if alternatives else False


@dataclass(frozen=True)
class _Scope:
    schema: dict[str, Any]
    resolve: Resolve
    within: dict[str, Any]
    """What values are known to be."""
    depth: int

    def opposite(self, schema: Schema, within: Schema = True) -> Schema:
        return negated(schema, self.resolve, self.resolve(within), self.depth + 1)

    def failures(self, keyword: str) -> list[Schema]:
        """Schemas of the values at which one keyword fails."""
        schema, value = self.schema, self.schema[keyword]
        types = types_of(self.within)
        if keyword in _SPEAKS_OF and not types & _SPEAKS_OF[keyword]:
            return []
        match keyword:
            case "type":
                return _other_types(types_of({"type": value}), types)
            case "const" | "enum":
                return _other_values([value] if keyword == "const" else value, types)
            case "required":
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                known = self.within.get("properties", {})
                some = {name: self.opposite(each, known.get(name, True)) for name, each in value.items()}
                return [_with_property(name, each) for name, each in some.items() if each is not False]
            case "additionalProperties":
                return self._other_properties(value)
            case "items":
                return self._other_items(value)
            case "allOf":
                return [self.opposite(each, self.within) for each in value]
            case "anyOf":
                return [{"allOf": [self.opposite(each, self.within) for each in value]}]
            case "oneOf":
                return self._none_or_several(value)
            case "if":
                then, otherwise = (schema.get(name, True) for name in ("then", "else"))
                return [
                    {"allOf": [value, self.opposite(then, self.within)]},
                    {"allOf": [self.opposite(value, self.within), self.opposite(otherwise, self.within)]},
                ]
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                wanted = {name: {"required": each} if isinstance(each, list) else each for name, each in value.items()}
                return [
                    {"allOf": [_with_property(name, True), self.opposite(each, self.within)]}
                    for name, each in wanted.items()
                ]
            case "not":
                return [value]
            case "format" if value not in REGEXES:
                return []
            case _:
                return [_beyond_bound(keyword, value)]

    def _other_properties(self, others: Schema) -> list[Schema]:
        """With one that is not named; those that there may be have to be known."""
        opposite = self.opposite(others)
        if opposite is False:
            return []
        if self.within.get("additionalProperties") is not False or "patternProperties" in (self.within | self.schema):
            raise NotExpressibleError("additionalProperties")
        named = self.schema.get("properties", {})
        return [_with_property(name, opposite) for name in self.within.get("properties", {}) if name not in named]

    def _other_items(self, items: Schema) -> list[Schema]:
        """With one that fails; where all surely do, any."""
        if items is True or items == {}:
            return []
        known = self.within.get("items", True)
        if isinstance(items, list) or isinstance(known, list) or "prefixItems" in (self.within | self.schema):
            raise NotExpressibleError("items of their places")
        if not are_disjoint(items, known, self.resolve):
            raise NotExpressibleError("items")
        return [{"type": "array", "minItems": 1}]

    def _none_or_several(self, branches: list[Schema]) -> list[Schema]:
        none: Schema = {"allOf": [self.opposite(each, self.within) for each in branches]}
        pairs = [pair for pair in combinations(branches, 2) if not are_disjoint(*pair, self.resolve)]
        if len(pairs) > MAX_PAIRS:
            raise NotExpressibleError("oneOf with so many branches that overlap")
        return [none, *({"allOf": list(pair)} for pair in pairs)]


def _with_property(name: str, schema: Schema) -> Schema:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def _beyond_bound(keyword: str, value: Any) -> Schema:
    if isinstance(value, bool):
        raise NotExpressibleError(keyword)
    match keyword:
        case "minLength":
            return {"type": "string", "maxLength": value - 1} if value > 0 else False
        case "maxLength":
            return {"type": "string", "minLength": value + 1}
        case "minItems":
            return {"type": "array", "maxItems": value - 1} if value > 0 else False
        case "maxItems":
            return {"type": "array", "minItems": value + 1}
        case "minProperties":
            return {"type": "object", "maxProperties": value - 1} if value > 0 else False
        case "maxProperties":
            return {"type": "object", "minProperties": value + 1}
        case "minimum":
            return {"type": "number", "exclusiveMaximum": value}
        case "maximum":
            return {"type": "number", "exclusiveMinimum": value}
        case "exclusiveMinimum":
            return {"type": "number", "maximum": value}
        case "exclusiveMaximum":
            return {"type": "number", "minimum": value}
    raise NotExpressibleError(keyword)


def types_of(schema: Schema) -> set[str]:
    """That its values may have; `integer` counts as itself."""
    if isinstance(schema, bool):
        return set(TYPES) if schema else set()
    if "const" in schema or "enum" in schema:
        return {_type_of(value) for value in ([schema["const"]] if "const" in schema else schema["enum"])}
    named = schema.get("type", list(TYPES))
    return {named} if isinstance(named, str) else set(named)


def _other_types(types: set[str], known: set[str]) -> list[Schema]:
    if "integer" in types and "number" not in types:
        if "number" in known:
            raise NotExpressibleError("type: integer")
        types = types | {"number"}
    others = [each for each in TYPES if each not in types]
    return [{"type": others}] if others else []


def _other_values(values: list[Any], known: set[str]) -> list[Schema]:
    """Of the same types, and all others'."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(_type_of(value), []).append(value)
    if by_type.keys() & {"array", "object"} & known:
        raise NotExpressibleError("enum or const with arrays or objects")
    others = [each for each in TYPES if each not in by_type]
    alternatives: list[Schema] = [{"type": others}]
    if "string" in by_type:
        alternatives.append({"type": "string", "pattern": RustPattern(f"^{_any_but(by_type['string'])}$")})
    if "number" in by_type:
        alternatives += _between(sorted({*by_type["number"]}))
    if len({*by_type.get("boolean", [])}) == 1:
        alternatives.append({"const": not by_type["boolean"][0]})
    return alternatives


def _between(numbers: list[float]) -> Iterator[Schema]:
    """All numbers but these."""
    for above, below in pairwise([None, *numbers, None]):
        bounds = {"exclusiveMinimum": above, "exclusiveMaximum": below}
        yield {"type": "number"} | {name: bound for name, bound in bounds.items() if bound is not None}


def _any_but(words: Iterable[str]) -> str:
    """A regular expression, without looking ahead, of every text but these."""
    rest: dict[str, list[str]] = {}
    is_word = False
    for word in words:
        if word:
            rest.setdefault(word[0], []).append(word[1:])
        else:
            is_word = True
    others = "".join(_in_class(char) for char in rest)
    ways = [f"[^{others}](?s:.*)" if others else "(?s:.+)"]
    ways += [re.escape(char) + _any_but(tails) for char, tails in rest.items()]
    return f"({'' if is_word else '|'}{'|'.join(ways)})"


def _in_class(char: str) -> str:
    return char if char.isalnum() else f"\\{char}" if char.isascii() and char.isprintable() else f"\\x{{{ord(char):x}}}"


def are_disjoint(one: Schema, other: Schema, resolve: Resolve) -> bool:
    """Whether no value is surely allowed by both. False where that cannot be seen."""
    one, other = resolve(one), resolve(other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    types = _with_integers(types_of(one)), _with_integers(types_of(other))
    common = types[0] & types[1]
    if not common:
        return True
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    return common == {"object"} and any(
        _differs(name, one, other, resolve) for name in {*one.get("required", ()), *other.get("required", ())}
    )


def _differs(name: str, one: dict[str, Any], other: dict[str, Any], resolve: Resolve) -> bool:
    """Whether no object with this property, which one of them requires, is allowed by both."""
    schemas = [_of_property(name, each) for each in (one, other)]
    return are_disjoint(schemas[0], schemas[1], resolve)


def _of_property(name: str, schema: dict[str, Any]) -> Schema:
    properties = schema.get("properties", {})
    if name in properties:
        found: Schema = properties[name]
        return found
    if "patternProperties" in schema:
        return True
    others: Schema = schema.get("additionalProperties", True)
    return others


def listed_values(schema: Schema) -> list[Any]:
    """The schema allows no others; each once. Raises NotExpressibleError."""
    if isinstance(schema, bool) or not ("const" in schema or "enum" in schema):
        raise NotExpressibleError("values that are not listed")
    values = [schema["const"]] if "const" in schema else schema["enum"]
    return list({_spelled(value): value for value in values}.values())


def _values(schema: dict[str, Any]) -> set[str] | None:
    """Spelled so that equal ones are equal; None: not listed."""
    if "const" in schema:
        return {_spelled(schema["const"])}
    return {_spelled(value) for value in schema["enum"]} if "enum" in schema else None


def _spelled(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _with_integers(types: set[str]) -> set[str]:
    return (types - {"number"}) | {"integer", "other number"} if "number" in types else types


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
