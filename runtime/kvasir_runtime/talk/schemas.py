"""What JSON Schemas of arguments say to formats that are not JSON."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.formats import REGEXES
from kvasir_runtime.structured.json_schema import UnsupportedKeywordError
from kvasir_runtime.structured.negation import CHECKED
from kvasir_runtime.talk.lark import TextRule, fault_of_regex

MAX_REFS: Final = 32
OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties")
_DEFINITIONS: Final = ("$schema", "$defs", "definitions")

ALL_TYPES: Final = ("string", "integer", "number", "boolean", "null", "array", "object")
_FOREIGN_TYPES: Final = {
    "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object",
    "list": "array", "tuple": "array",
}  # fmt: skip
"""Python's, which tools are described with at times."""
_OF_OBJECTS: Final = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
)  # fmt: skip
_OF_ARRAYS: Final = (
    "items", "additionalItems", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"
)  # fmt: skip
_OF_STRINGS: Final = ("pattern", "minLength", "maxLength", "format")
_OF_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SPEAKS_OF: Final = {
    **dict.fromkeys(_OF_OBJECTS, ("object",)),
    **dict.fromkeys(_OF_ARRAYS, ("array",)),
    **dict.fromkeys(_OF_STRINGS, ("string",)),
    **dict.fromkeys(_OF_NUMBERS, ("integer", "number")),
}
"""The types whose values a keyword can refuse."""


def properties_of(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Any) -> frozenset[str]:
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def referred(schema: Any, root: Any) -> Any:
    """What its `$ref` leads to, or the only branch of its `allOf`, or itself. None: it leads nowhere."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(schema.get("$ref"), str):
            schema = _target(schema["$ref"], root)
        elif (branch := only_branch(schema)) is not None:
            schema = branch
        else:
            return schema
    return None


def _target(reference: str, root: Any) -> Any:
    found = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        found = found if not key else found.get(key) if isinstance(found, Mapping) else None
    return found


def only_branch(schema: Mapping[str, Any]) -> Any:
    """Of an `allOf` beside which nothing is said. None: there is none such."""
    branches = schema.get("allOf")
    if isinstance(branches, list) and len(branches) == 1 and schema.keys() & CHECKED == {"allOf"}:
        return branches[0]
    return None


def listed_values(schema: Any) -> list[Any] | None:
    """All values that its `const` or `enum` allows beside its type. None: they are not listed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    types = _declared(schema)
    return [
        value
        for value in values
        if not types or _type_of(value) in types or ("number" in types and _type_of(value) == "integer")
    ]


def _declared(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type")
    given = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    return [_FOREIGN_TYPES.get(each, each) for each in given if isinstance(each, str)]


def types_of(schema: Any, root: Any, depth: int = 0) -> frozenset[str]:
    """What values of a schema may be; none: it does not say."""
    schema = referred(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_REFS:
        return frozenset()
    types = set(_own_types(schema))
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        for branch in branches if isinstance(branches, list) else ():
            types |= types_of(branch, root, depth + 1)
    return frozenset(types)


def _own_types(schema: Mapping[str, Any]) -> Iterable[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    listed = [_type_of(value) for value in values] if isinstance(values, list) else []
    return _declared(schema) or listed


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


class ArgumentsSchema:
    """Of one tool's arguments, as grammars read it that know a part of JSON Schema. Where it is strict, another keyword
    is refused by name and place; else it is left out."""

    def __init__(self, schema: Any, *, is_strict: bool) -> None:
        """Raises GrammarError."""
        if schema is not None and schema is not True and not isinstance(schema, Mapping):
            raise GrammarError(f"the schema of arguments is an object, but there is {schema!r:.100}")
        self.is_strict = is_strict
        self.root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        self.top = self.referred(self.root, "")
        self.check(self.top, OBJECT_KEYWORDS, "")
        self._definitions = {name: self.root[name] for name in _DEFINITIONS if name in self.root}

    def referred(self, schema: Any, place: str) -> Any:
        """Raises GrammarError where more is said beside a reference."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            self.check(schema, ("$ref",), place)
        found = referred(schema, self.root)
        if found is None and self.is_strict:
            raise GrammarError(f"at {place or 'the top'} of the schema a reference leads nowhere in it")
        return {} if found is None else found

    def types_of(self, schema: Any) -> frozenset[str]:
        return types_of(schema, self.root)

    def alone(self, schema: Any) -> Any:
        """With the definitions that its references lead to."""
        return {**self._definitions, **schema} if isinstance(schema, Mapping) else schema

    def check(self, schema: Any, known: Iterable[str], place: str) -> None:
        """Raises GrammarError at the first other keyword that could fail."""
        if not self.is_strict or not isinstance(schema, Mapping):
            return
        types = _declared(schema)
        for keyword in schema:
            only_describes = (keyword == "format" and schema[keyword] not in REGEXES) or (
                keyword == "additionalItems" and not isinstance(schema.get("items"), list)
            )
            speaks_of_others = bool(types) and keyword in _SPEAKS_OF and not {*types} & {*_SPEAKS_OF[keyword]}
            if keyword in CHECKED and keyword not in known and not only_describes and not speaks_of_others:
                raise UnsupportedKeywordError(keyword, place, "this model writes arguments in a format of its own")
        if isinstance(schema.get("items"), list):
            raise UnsupportedKeywordError("items", place, "this model writes arguments in a format of its own")

    def text_rule(self, schema: Any, place: str) -> TextRule | None:
        """Of a string's schema. None: any text. Raises GrammarError."""
        if not isinstance(schema, Mapping):
            return None
        shortest, longest, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
        if not isinstance(shortest, int) or not isinstance(longest, int | None) or not isinstance(pattern, str | None):
            raise GrammarError(
                f"at {place} of the schema minLength and maxLength are integers, and a pattern is a text"
            )
        if pattern is not None and (fault := fault_of_regex(pattern)):
            if self.is_strict:
                raise UnsupportedKeywordError("pattern", place, fault)
            pattern = None
        rule = TextRule(shortest, longest, pattern, REGEXES.get(schema.get("format", "")))
        return rule if rule.has_length or rule.has_regex else None


def named_properties(schema: Any) -> dict[str, Any]:
    """In their order; then those that are only required."""
    properties = {name: each for name, each in properties_of(schema).items() if each is not False}
    return properties | {name: True for name in sorted(required_of(schema)) if name not in properties}
