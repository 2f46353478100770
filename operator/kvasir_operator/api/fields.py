"""How a dataclass field of api/model.py is spelled and bounded in the manifest, and written back to it.

What a field may hold is written in its `Annotated` type, in the words of the CRD's schema.

Parsing, writing back and the generators of the CRD and of the reference all read the dataclasses through this one view.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource

UNION_ORIGINS = (Union, UnionType)
# Dataclasses that are one text in the manifest.
TEXT_TYPES = (Duration, Quantity, ModelSource)


@dataclass(frozen=True)
class Bounds:
    """Smallest and largest number, both allowed."""

    minimum: float
    maximum: float


@dataclass(frozen=True)
class Pattern:
    """Regular expression (None: any text) and the longest text."""

    regex: str | None
    max_length: int


@dataclass(frozen=True)
class Items:
    """Longest list or map; `unique` for a list of values, `unique_by` for a list of objects with that field as key."""

    maximum: int
    unique: bool = False
    unique_by: str | None = None


@dataclass(frozen=True)
class Key:
    """The manifest's spelling of a field where camelCase of its Python name is not it."""

    name: str


@dataclass(frozen=True)
class Format:
    """What a text is, in a word of OpenAPI; the API server checks it."""

    name: str


@dataclass(frozen=True)
class ManifestField:
    """One field: `name` in Python, `key` in the manifest.

    hint: its type without None, with its constraints still inside `Annotated`.
    """

    name: str
    key: str
    hint: Any
    is_optional: bool  # may be None
    is_required: bool
    default: Any  # meaningless where required

    @property
    def is_filled_in(self) -> bool:
        """Whether the API server writes the default into a manifest without this field.

        Empty lists and maps are not worth a line, nor are groups in which nothing would be filled in.
        """
        if self.is_required or self.default is None:
            return False
        kind = bare(self.hint)
        if is_group(kind):
            return any(f.is_filled_in for f in manifest_fields(kind))
        return self.default not in ((), {})


@cache
def manifest_fields(cls: type) -> tuple[ManifestField, ...]:
    """The fields of a manifest dataclass, in the order they are written."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_manifest_field(f, hints[f.name]) for f in dataclasses.fields(cls))


def _manifest_field(f: "dataclasses.Field[Any]", hint: Any) -> ManifestField:
    hint, is_optional = without_none(hint)
    is_required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    return ManifestField(
        f.name, _key(f.name, hint), hint, is_optional, is_required, None if is_required else _default(f)
    )


def _default(f: "dataclasses.Field[Any]") -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _key(name: str, hint: Any) -> str:
    for constraint in constraints(hint):
        if isinstance(constraint, Key):
            return constraint.name
    return camel_case(name)


def camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True), anything else as (itself, False)."""
    if get_origin(hint) not in UNION_ORIGINS or NoneType not in get_args(hint):
        return hint, False
    rest = [arg for arg in get_args(hint) if arg is not NoneType]
    return Union[tuple(rest)], True  # noqa: UP007  (a Union of a computed tuple cannot be written with |)


def constraints(hint: Any) -> tuple[Any, ...]:
    """What stands in the `Annotated` of a type."""
    return tuple(hint.__metadata__) if get_origin(hint) is Annotated else ()


def bare(hint: Any) -> Any:
    """The type without its constraints."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def is_group(kind: Any) -> bool:
    """A dataclass with fields of its own in the manifest."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in TEXT_TYPES


def as_manifest(value: Any) -> Any:
    """A value as YAML would hold it: camelCase keys, absent and default fields left out.

    Leaving defaults out keeps the result the same when a later release adds a field.
    """
    if isinstance(value, (Duration, Quantity, ModelSource)):
        return value.text
    if isinstance(value, tuple):
        return [as_manifest(item) for item in value]
    if isinstance(value, Mapping):
        return {key: as_manifest(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.key: as_manifest(v) for f in manifest_fields(type(value)) if (v := getattr(value, f.name)) != f.default
        }
    return value
