"""OpenAPI schemas of manifest dataclasses: types, bounds, defaults, descriptions and the CEL text of their rules.

Kubernetes' structural schemas have no references: a group that stands in four places is written out four times. Python
keeps no docstring of a field, so that descriptions are read from the source; only generators do, never a pass.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from kvasir_operator.api.fields import (
    UNION_ORIGINS,
    Bounds,
    Format,
    Items,
    ManifestField,
    Pattern,
    as_manifest,
    bare,
    camel_case,
    constraints,
    is_group,
    manifest_fields,
)
from kvasir_operator.api.quantity import DURATION_PATTERN, QUANTITY_PATTERN, Duration, Quantity
from kvasir_operator.api.rule import Rule
from kvasir_operator.api.rules import rules_of
from kvasir_operator.api.source import ModelSource

Schema = dict[str, Any]

_MAX_TEXT_LENGTH = 32  # characters of a duration or quantity
_MAX_SOURCE_LENGTH = 1024  # characters
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NUMBER_OR_TEXT = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
_TEXTS: Mapping[Any, Schema] = {
    Duration: {"type": "string", "maxLength": _MAX_TEXT_LENGTH, "pattern": DURATION_PATTERN},
    Quantity: {**_NUMBER_OR_TEXT, "minimum": 0, "maxLength": _MAX_TEXT_LENGTH, "pattern": QUANTITY_PATTERN},
    ModelSource: {"type": "string", "maxLength": _MAX_SOURCE_LENGTH},
}


def group_schema(cls: type) -> Schema:
    """Of a dataclass whose fields are the manifest's."""
    fields = manifest_fields(cls)
    required = [f.key for f in fields if f.is_required]
    return {
        "description": class_description(cls),
        "type": "object",
        **({"required": required} if required else {}),
        **validations(rules_of(cls)),
        "properties": {f.key: _field_schema(cls, f) for f in fields},
    }


def validations(rules: tuple[Rule, ...]) -> Schema:
    """The rules as the API server evaluates them."""
    return {"x-kubernetes-validations": [_validation(rule) for rule in rules]} if rules else {}


def _validation(rule: Rule) -> Schema:
    text = {"rule": " ".join(rule.cel.split()), "message": rule.message}
    return {**text, "optionalOldSelf": True} if "oldSelf" in rule.cel else text


def _field_schema(cls: type, f: ManifestField) -> Schema:
    """A field that says nothing itself is described by its group."""
    schema = _schema(f.hint)
    said = field_descriptions(cls).get(f.name)
    if said is not None:
        schema = {"description": said, **{key: value for key, value in schema.items() if key != "description"}}
    return {**schema, "default": _default(f)} if f.is_filled_in else schema


def _default(f: ManifestField) -> Any:
    """A group's own fields have theirs, which the API server fills in next."""
    return {} if is_group(bare(f.hint)) else as_manifest(f.default)


def _schema(hint: Any) -> Schema:
    kind, limits = bare(hint), constraints(hint)
    origin = get_origin(kind)
    if kind in _TEXTS:
        return {**_TEXTS[kind], **validations(rules_of(kind))}
    if is_group(kind):
        return group_schema(kind)
    if origin is tuple:
        return {"type": "array", **_item_limits(limits, "maxItems"), "items": _schema(get_args(kind)[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", **_item_limits(limits, "maxProperties"), **_values(get_args(kind)[1])}
    if origin in UNION_ORIGINS:
        return {**_NUMBER_OR_TEXT, **_scalar_limits(limits), **_only_word(get_args(kind))}
    if origin is Literal:
        return {"type": _SCALARS[type(get_args(kind)[0])], "enum": list(get_args(kind))}
    return {"type": _SCALARS[kind], **_scalar_limits(limits)}


def _values(hint: Any) -> Schema:
    if hint is Any:
        return {"x-kubernetes-preserve-unknown-fields": True}
    return {"additionalProperties": _schema(hint)}


def _only_word(kinds: tuple[Any, ...]) -> Schema:
    """Of `int | Literal["auto"]`: the word."""
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return {"pattern": f"^({'|'.join(words)})$", "maxLength": max(map(len, words))} if words else {}


def _scalar_limits(limits: tuple[Any, ...]) -> Schema:
    schema: Schema = {}
    for limit in limits:
        if isinstance(limit, Bounds):
            schema |= {"minimum": limit.minimum, "maximum": limit.maximum}
        elif isinstance(limit, Pattern):
            schema |= {"maxLength": limit.max_length} | ({"pattern": limit.regex} if limit.regex else {})
        elif isinstance(limit, Format):
            schema["format"] = limit.name
    return schema


def _item_limits(limits: tuple[Any, ...], most: str) -> Schema:
    """`most`: the schema's word for the largest number of items of a list, or of a map."""
    schema: Schema = {}
    for limit in limits:
        if isinstance(limit, Items):
            schema[most] = limit.maximum
            if limit.unique:
                schema["x-kubernetes-list-type"] = "set"
            if limit.unique_by:
                schema |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [camel_case(limit.unique_by)]}
    return schema


def class_description(cls: type) -> str:
    """The first paragraph, on one line."""
    return _one_line((inspect.getdoc(cls) or "").partition("\n\n")[0])


@cache
def field_descriptions(cls: type) -> dict[str, str]:
    """By the field's Python name; fields that say nothing themselves are left out."""
    body = _class_body(cls)
    return {
        field.target.id: _one_line(said.value.value)
        for field, said in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant) and isinstance(said.value.value, str)
    }


def _class_body(cls: type) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _one_line(text: str) -> str:
    return " ".join(text.split())
