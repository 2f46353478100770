#!/usr/bin/env python3
"""Writes docs/reference/inferenceservice.md: every field of the manifest in tables, a section a dataclass.

Made from the same classes as the CRD; a test compares the two. A group that stands in several places has one section,
to which each links.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from kvasir_operator.api import labels
from kvasir_operator.api.fields import (
    UNION_ORIGINS,
    Bounds,
    Items,
    ManifestField,
    Pattern,
    as_manifest,
    bare,
    constraints,
    is_group,
    manifest_fields,
)
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.rules import rules_of
from kvasir_operator.api.schema import class_description, field_descriptions
from kvasir_operator.api.service_status import ServiceStatus
from kvasir_operator.api.source import ModelSource

PAGE = Path(__file__).parent / "reference" / "inferenceservice.md"
_TEXTS = {Duration: "duration (`500ms`, `30s`, `10m`)", Quantity: "quantity (`500m`, `8`, `64Gi`)", ModelSource: "text"}
_SCALARS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def page() -> str:
    roots = (ServiceSpec, ServiceStatus)
    lines = [
        f"# {labels.KIND} `{labels.API_VERSION}`",
        "",
        class_description(InferenceService),
        f"Made by `make generate`; `kubectl explain {labels.SINGULAR}.spec` says the same.",
        "",
        "- `spec`: [ServiceSpec](#servicespec)",
        "- `status`: [ServiceStatus](#servicestatus), which the operator writes",
        *_rules(InferenceService),
    ]
    for cls in dict.fromkeys(cls for root in roots for cls in _groups(root)):
        lines += ["", *_section(cls)]
    return "\n".join(lines) + "\n"


def _groups(cls: type) -> Iterator[type]:
    """A group and those below it, in the order of the manifest."""
    yield cls
    for f in manifest_fields(cls):
        below = _element(f.hint)
        if is_group(below):
            yield from _groups(below)


def _element(hint: Any) -> Any:
    """The type of a field, or of a list's elements."""
    kind = bare(hint)
    return bare(get_args(kind)[0]) if get_origin(kind) is tuple else kind


def _section(cls: type) -> list[str]:
    return [
        f"## {cls.__name__}",
        "",
        class_description(cls),
        "",
        "| field | type | default | |",
        "| --- | --- | --- | --- |",
        *(_row(cls, f) for f in manifest_fields(cls)),
        *_rules(cls),
    ]


def _row(cls: type, f: ManifestField) -> str:
    said = field_descriptions(cls).get(f.name) or class_description(bare(f.hint))
    return f"| `{f.key}` | {_type(f.hint)} | {_default(f)} | {_cell(said)} |"


def _rules(cls: type) -> Iterable[str]:
    rules = rules_of(cls)
    return (
        (
            "",
            "What contradicts itself is refused, with what to write instead:",
            "",
            *(f"- {_cell(rule.message)}" for rule in rules),
        )
        if rules
        else ()
    )


def _default(f: ManifestField) -> str:
    if f.is_required:
        return "required"
    return f"`{_yaml(as_manifest(f.default))}`" if f.is_filled_in and not is_group(bare(f.hint)) else ""


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(hint: Any) -> str:
    kind, limits = bare(hint), constraints(hint)
    origin = get_origin(kind)
    if kind in _TEXTS:
        return _TEXTS[kind]
    if is_group(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if origin is tuple:
        return f"list{_most(limits)} of {_type(get_args(kind)[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = get_args(kind)[1]
        return "object" if value is Any else f"map{_most(limits)} to {_type(value)}"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if origin in UNION_ORIGINS:
        return f"{' or '.join(_type(arg) for arg in get_args(kind))}{_limits(limits)}"
    return f"{_SCALARS[kind]}{_limits(limits)}"


def _most(limits: tuple[Any, ...]) -> str:
    return "".join(f" (at most {limit.maximum})" for limit in limits if isinstance(limit, Items))


def _limits(limits: tuple[Any, ...]) -> str:
    return "".join(f", {_limit(limit)}" for limit in limits if isinstance(limit, Bounds | Pattern))


def _limit(limit: Bounds | Pattern) -> str:
    if isinstance(limit, Bounds):
        return f"{limit.minimum} to {limit.maximum}"
    longest = f"at most {limit.max_length} characters"
    return longest if limit.regex is None else f"{longest} that match `{_cell(limit.regex)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
