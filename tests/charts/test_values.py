"""Every value of the chart has a description and a schema, and the README shows them as they are."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from charts.values_table import CHART, documented_values, with_table

from kvasir_operator.api.fields import manifest_fields
from kvasir_operator.api.model import PodSpec, ResourcesSpec, RouterResources

VALUES_TEXT = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(VALUES_TEXT)
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, key))
    else:
        yield path


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return schema if reference is None else SCHEMA["definitions"][reference.rpartition("/")[2]]


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of an object whose keys are known."""
    schema = resolved(schema)
    for key, below in schema.get("properties", {}).items():
        yield from objects(below, f"{path}.{key}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")
    if "properties" in schema:
        yield path, schema


def overlaid(values: Any, given: Any) -> Any:
    """As Helm overlays them: maps key by key, null takes a key away."""
    if not (isinstance(values, dict) and isinstance(given, dict)):
        return given
    merged = {key: overlaid(values.get(key), value) for key, value in given.items()}
    return {key: value for key, value in {**values, **merged}.items() if value is not None}


def test_every_value_is_described() -> None:
    described = {tuple(value.path.split(".")) for value in documented_values(VALUES_TEXT)}
    undescribed = [path for path in leaves(VALUES) if not any(path[:end] in described for end in range(len(path) + 1))]
    assert undescribed == []


def test_the_readme_has_the_table_of_the_values() -> None:
    readme = (CHART / "README.md").read_text()
    assert readme == with_table(readme, VALUES_TEXT), "run charts/values_table.py"


def test_the_schema_knows_the_same_keys_as_the_values() -> None:
    for path, schema in objects(SCHEMA):
        if "[]" in path:
            continue
        values = VALUES
        for key in path.split(".")[1:]:
            values = values.get(key, {})
        if values == {}:
            continue  # for the user to fill
        assert set(values) == set(schema["properties"]) - {"global"}, path


def test_the_schema_refuses_unknown_keys_everywhere() -> None:
    assert [path for path, schema in objects(SCHEMA) if schema.get("additionalProperties") is not False] == []


@pytest.mark.parametrize(
    ("definition", "group", "manifest", "left_out"),
    [
        ("podSettings", None, PodSpec, set()),
        ("engineDefaults", "resources", ResourcesSpec, {"profile"}),
        ("routerDefaults", "resources", RouterResources, set()),
    ],
)
def test_pod_defaults_and_profiles_take_the_fields_of_the_manifest(
    definition: str, group: str | None, manifest: type, left_out: set[str]
) -> None:
    properties = SCHEMA["definitions"][definition]["properties"]
    taken = properties if group is None else properties[group]["properties"]
    assert set(taken) == {field.key for field in manifest_fields(manifest)} - left_out


@pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem)
def test_the_schema_accepts_every_ci_file(file: Path) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(overlaid(VALUES, yaml.safe_load(file.read_text())), SCHEMA)
