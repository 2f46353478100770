"""What JSON Schemas of arguments say to formats that are not JSON."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvasir_runtime.errors import GrammarError
from kvasir_runtime.structured.json_schema import UnsupportedKeywordError
from kvasir_runtime.structured.negation import CHECKED, FORMATS

MAX_REFS: Final = 32
OBJECT_KEYWORDS: Final = ("type", "properties", "required", "additionalProperties")
_DEFINITIONS: Final = ("$schema", "$defs", "definitions")


def properties_of(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Any) -> frozenset[str]:
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def referred(schema: Any, root: Any) -> Any:
    """What its `$ref` leads to, or itself. None: it leads nowhere."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        found = root
        for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            found = found if not key else found.get(key) if isinstance(found, Mapping) else None
        schema = found
    return None


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
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list):
        return [each for each in declared if isinstance(each, str)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [_type_of(value) for value in values] if isinstance(values, list) else []


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
        self.top = self.referred(self.root)
        self.check(self.top, OBJECT_KEYWORDS, "")
        self._definitions = {name: self.root[name] for name in _DEFINITIONS if name in self.root}

    def referred(self, schema: Any) -> Any:
        return referred(schema, self.root)

    def types_of(self, schema: Any) -> frozenset[str]:
        return types_of(schema, self.root)

    def alone(self, schema: Any) -> Any:
        """With the definitions that its references lead to."""
        return {**self._definitions, **schema} if isinstance(schema, Mapping) else schema

    def check(self, schema: Any, known: Iterable[str], place: str) -> None:
        """Raises GrammarError at the first other keyword that could fail."""
        if not self.is_strict or not isinstance(schema, Mapping):
            return
        for keyword in schema:
            only_describes = keyword == "format" and schema[keyword] not in FORMATS
            if keyword in CHECKED and keyword not in known and not only_describes:
                raise UnsupportedKeywordError(keyword, place, "this model writes arguments in a format of its own")


def named_properties(schema: Any) -> dict[str, Any]:
    """In their order; then those that are only required."""
    properties = dict(properties_of(schema))
    return properties | {name: True for name in sorted(required_of(schema)) if name not in properties}
