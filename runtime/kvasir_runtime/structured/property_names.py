"""Objects in which a name that is not listed cannot stand for one that is.

llguidance lets a name that is not listed have escapes: `"\\u0061"` is another name than `"a"` to it, and the same one
to whoever reads the answer, whose value would then follow another schema. What a pattern names has no such escapes,
so a name that nothing lists becomes one of a pattern. Where that cannot be written, no text of the answer has them.
"""

import re
from typing import Any, Final

from kvasir_runtime.structured.negation import Schema, types_of

ESCAPES_OF_ONE_LETTER: Final = 'nrbtf\\"'
"""Nothing has two spellings then; control characters but these cannot be written."""
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that have escapes in a pattern's names too."""
_MAPS: Final = ("properties", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = ("additionalProperties", "additionalItems", "items", "not")


class NotSealedError(Exception):
    """An object's other names cannot be written as those of a pattern."""


def has_two_spellings(schema: Schema) -> bool:
    """Whether a listed name of some object can be written as one that is not listed."""
    return isinstance(schema, dict) and (
        _is_open(schema) or any(has_two_spellings(each) for each in _within(schema, (*_MAPS, "patternProperties")))
    )


def sealed(schema: Schema) -> Schema:
    """The same schema, in which other names are those of a pattern. Raises NotSealedError."""
    if isinstance(schema, bool):
        return schema
    if schema.get("patternProperties"):
        raise NotSealedError  # what stands together must have the same patterns
    rewritten = {name: _sealed_value(name, value) for name, value in schema.items()}
    if not _is_open(schema):
        return rewritten
    if schema.get("additionalProperties", True) not in (True, {}) or any(map(_CONTROLS.search, schema["properties"])):
        raise NotSealedError
    return rewritten | {"patternProperties": {"": True}, "additionalProperties": False}


def _sealed_value(keyword: str, value: Any) -> Any:
    if keyword in _MAPS:
        return {name: sealed(each) for name, each in value.items()}
    if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        return [sealed(each) for each in value]
    return sealed(value) if keyword in _SINGLE else value


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether other names stand beside listed ones."""
    listed = schema.get("properties") or schema.get("patternProperties")
    return bool(listed) and schema.get("additionalProperties", True) is not False and "object" in types_of(schema)


def _within(schema: dict[str, Any], maps: tuple[str, ...]) -> list[Schema]:
    found: list[Schema] = []
    for name, value in schema.items():
        if name in maps:
            found += value.values()
        elif isinstance(value, list) and name in (*_LISTS, "items"):
            found += value
        elif name in _SINGLE:
            found.append(value)
    return found
