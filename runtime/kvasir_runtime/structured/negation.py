"""What a JSON Schema does not allow, as a schema of its own; and whether two schemas share no value.

llguidance has neither `not` nor `oneOf` nor `if`, but intersections and alternatives: so these become alternatives of
what is left when a keyword fails, wherever that can be written down exactly.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

Schema = dict[str, Any] | bool
Resolve = Callable[[Schema], Schema]
"""Follows `$ref`s; raises NotExpressibleError."""

TYPES: Final = ("object", "array", "string", "number", "boolean", "null")
FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
"""That are checked. Others describe only, as the specification has it for formats that nobody knows."""
MAX_DEPTH: Final = 16
"""Of opposites within opposites."""
CHECKED: Final = frozenset({
    "$dynamicRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains",
    "dependencies", "dependentRequired", "dependentSchemas", "enum", "exclusiveMaximum", "exclusiveMinimum", "format",
    "if", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties",
    "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
    "propertyNames", "required", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
"""Keywords that may fail; all others only describe, or go with one of these."""


class NotExpressibleError(Exception):
    """Its text is the keyword that stands in the way."""


def negated(schema: Schema, resolve: Resolve, depth: int = 0) -> Schema:
    """Allows exactly what `schema` does not. Raises NotExpressibleError."""
    if depth > MAX_DEPTH:
        raise NotExpressibleError("schemas so deep, or that refer to themselves")
    schema = resolve(schema)
    if isinstance(schema, bool):
        return not schema
    opposite = partial(negated, resolve=resolve, depth=depth + 1)
    failures = [each for keyword in schema if keyword in CHECKED for each in _failures(keyword, schema, opposite)]
    alternatives = [each for each in failures if each is not False]
    return {"anyOf": alternatives} if alternatives else False


def _failures(keyword: str, schema: dict[str, Any], opposite: Callable[[Schema], Schema]) -> list[Schema]:
    """Schemas of the values at which one keyword fails."""
    value = schema[keyword]
    match keyword:
        case "type":
            return _other_types(types_of(schema))
        case "const" | "enum":
            return _other_values([value] if keyword == "const" else value)
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            some = {name: opposite(each) for name, each in value.items()}
            return [
                {"type": "object", "properties": {name: each}, "required": [name]}
                for name, each in some.items()
                if each is not False
            ]
        case "allOf":
            return [opposite(each) for each in value]
        case "anyOf":
            return [{"allOf": [opposite(each) for each in value]}]
        case "not":
            return [value]
        case "format" if value not in FORMATS:
            return []
        case _:
            return [_beyond_bound(keyword, value)]


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


def _other_types(types: set[str]) -> list[Schema]:
    if "integer" in types and "number" not in types:
        raise NotExpressibleError("type: integer")
    others = [each for each in TYPES if each not in types]
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> list[Schema]:
    """Of the same types, and all others'."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(_type_of(value), []).append(value)
    if not by_type.keys() <= {"string", "boolean", "null"}:
        raise NotExpressibleError("enum or const with numbers, arrays or objects")
    others = [each for each in TYPES if each not in by_type]
    alternatives: list[Schema] = [{"type": others}]
    if "string" in by_type:
        alternatives.append({"type": "string", "pattern": f"^{_any_but(by_type['string'])}$"})
    if len(by_type.get("boolean", [])) == 1:
        alternatives.append({"const": not by_type["boolean"][0]})
    return alternatives


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
