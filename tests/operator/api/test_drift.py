"""The CRD under crds/ and the dataclasses of api/model.py agree both ways: fields, types, defaults, bounds, rules.

Each test puts one aspect of both sides into a dict by field path, so that a difference names its field.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from kvasir_operator.api import labels
from kvasir_operator.api.constraints import Bounds, Items, Pattern
from kvasir_operator.api.fields import UNION_ORIGINS, bare, constraints, manifest_fields
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.api.quantity import DURATION_PATTERN, QUANTITY_PATTERN, Duration, Quantity
from kvasir_operator.api.rules import rules_of
from kvasir_operator.api.serialize import as_manifest
from kvasir_operator.api.source import PARENT_MESSAGE, SOURCE_MESSAGE, SOURCE_PATTERN, ModelSource

CRD_FILE = Path(__file__).parents[3] / "crds" / "serving.kvasir.dev_inferenceservices.yaml"
CRD = yaml.safe_load(CRD_FILE.read_text())
VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
BOUNDS = ("minimum", "maximum", "pattern", "maxItems", "maxProperties", "maxLength", "x-kubernetes-list-type")


def is_group(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and kind not in (Duration, Quantity, ModelSource)


def walk(hint: Any, schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(path, type, schema) of a field and of everything below it, as far as both sides have it."""
    yield path, hint, schema
    kind = bare(hint)
    if is_group(kind):
        for f in manifest_fields(kind):
            if f.key in schema.get("properties", {}):
                yield from walk(f.hint, schema["properties"][f.key], f"{path}.{f.key}")
    elif get_origin(kind) is tuple:
        yield from walk(get_args(kind)[0], schema["items"], f"{path}[]")


NODES = list(walk(ServiceSpec, SCHEMA["properties"]["spec"], "spec"))
GROUPS = [(path, bare(hint), schema) for path, hint, schema in NODES if is_group(bare(hint))]


def test_every_group_has_the_same_fields() -> None:
    ours = {path: {f.key for f in manifest_fields(group)} for path, group, _ in GROUPS}

    assert ours == {path: set(schema["properties"]) for path, _, schema in GROUPS}


def test_the_same_fields_are_required() -> None:
    ours = {path: {f.key for f in manifest_fields(group) if f.is_required} for path, group, _ in GROUPS}

    assert ours == {path: set(schema.get("required", [])) for path, _, schema in GROUPS}


def test_defaults_are_the_same() -> None:
    ours, theirs = {}, {}
    for path, group, schema in GROUPS:
        ours |= {f"{path}.{f.key}": as_manifest(f.default) for f in manifest_fields(group) if f.default is not None}
        theirs |= {
            f"{path}.{key}": field["default"] for key, field in schema["properties"].items() if "default" in field
        }

    assert ours == theirs


def type_in_schema(hint: Any) -> str:
    kind = bare(hint)
    origin = get_origin(kind)
    if kind is Quantity or origin in UNION_ORIGINS:
        return "int-or-string"
    if origin is Literal:
        return SCALARS[type(get_args(kind)[0])]
    if is_group(kind) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "object"
    return "array" if origin is tuple else SCALARS.get(kind, "string")


def test_types_are_the_same() -> None:
    ours = {path: type_in_schema(hint) for path, hint, _ in NODES}

    assert ours == {path: schema.get("type", "int-or-string") for path, _, schema in NODES}


def test_choices_are_the_same() -> None:
    ours = {path: get_args(bare(hint)) for path, hint, _ in NODES if get_origin(bare(hint)) is Literal}

    assert ours == {path: tuple(schema["enum"]) for path, _, schema in NODES if "enum" in schema}


def bounds_in_schema(hint: Any) -> dict[str, Any]:
    """The constraints of a type in the words of a schema; lengths of our own text types are the CRD's alone."""
    kind = bare(hint)
    expected: dict[str, Any] = {}
    if kind is Quantity:
        expected |= {"minimum": 0, "pattern": QUANTITY_PATTERN, "maxLength": 32}
    if kind is Duration:
        expected |= {"pattern": DURATION_PATTERN, "maxLength": 32}
    if kind is ModelSource:
        expected["maxLength"] = 1024
    for word in (word for arg in get_args(kind) if get_origin(kind) in UNION_ORIGINS for word in get_args(arg)):
        expected |= {"pattern": f"^{word}$", "maxLength": len(word)}
    for constraint in constraints(hint):
        expected |= _in_schema(constraint, "maxItems" if get_origin(kind) is tuple else "maxProperties")
    return expected


def _in_schema(constraint: Any, length: str) -> dict[str, Any]:
    if isinstance(constraint, Bounds):
        return {"minimum": constraint.minimum, "maximum": constraint.maximum}
    if isinstance(constraint, Pattern):
        return {"maxLength": constraint.max_length} | ({"pattern": constraint.regex} if constraint.regex else {})
    if isinstance(constraint, Items):
        kind = "set" if constraint.unique else "map" if constraint.unique_by else None
        return {length: constraint.maximum} | ({"x-kubernetes-list-type": kind} if kind else {})
    return {}


def test_bounds_are_the_same() -> None:
    ours = {path: bounds_in_schema(hint) for path, hint, _ in NODES}

    assert ours == {path: {key: schema[key] for key in BOUNDS if key in schema} for path, _, schema in NODES}


def messages(schema: dict[str, Any]) -> list[str]:
    return [rule["message"] for rule in schema.get("x-kubernetes-validations", [])]


def test_rules_have_the_same_messages() -> None:
    ours = {path: [rule.message for rule in rules_of(bare(hint))] for path, hint, _ in NODES}
    ours |= {path: [SOURCE_MESSAGE, PARENT_MESSAGE] for path, hint, _ in NODES if bare(hint) is ModelSource}

    assert ours == {path: messages(schema) for path, _, schema in NODES}
    assert [rule.message for rule in rules_of(InferenceService)] == messages(SCHEMA)


def test_every_field_is_described() -> None:
    assert [path for path, _, schema in NODES if not path.endswith("[]") and not schema.get("description")] == []


def test_names_are_those_of_labels() -> None:
    names = CRD["spec"]["names"]

    assert (CRD["spec"]["group"], VERSION["name"]) == (labels.GROUP, labels.VERSION)
    assert (names["kind"], names["plural"], names["singular"]) == (labels.KIND, labels.PLURAL, labels.SINGULAR)
    assert names["shortNames"] == [labels.SHORT_NAME]
    assert f"<= {labels.MAX_SERVICE_NAME_LENGTH} " in SCHEMA["x-kubernetes-validations"][0]["rule"]


def test_the_source_rule_has_the_pattern_of_the_parser() -> None:
    source = SCHEMA["properties"]["spec"]["properties"]["model"]["properties"]["source"]
    found = re.fullmatch(r"self\.matches\('(.*)'\)", source["x-kubernetes-validations"][0]["rule"])
    assert found is not None

    assert found[1].replace("\\\\", "\\") == SOURCE_PATTERN


def test_the_crd_fits_into_the_annotation_of_a_client_side_apply() -> None:
    assert len(yaml.safe_dump(CRD)) < 100_000
