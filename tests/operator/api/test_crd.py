"""The CRD and the reference are made from the dataclasses: the committed files, and what stands in them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from docs.manifest_page import page

from kvasir_operator.api.crd import crd, crd_text
from kvasir_operator.api.fields import Bounds, Items, Pattern
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.schema import group_schema

ROOT = Path(__file__).parents[3]
CRD_NAME = "serving.kvasir.dev_inferenceservices.yaml"
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
COMMITTED = {
    f"crds/{CRD_NAME}": crd_text,
    f"charts/kvasir/files/crds/{CRD_NAME}": crd_text,
    "docs/reference/inferenceservice.md": page,
}


@pytest.mark.parametrize("path", COMMITTED)
def test_the_committed_file_is_what_the_dataclasses_say(path: str) -> None:
    assert (ROOT / path).read_text() == COMMITTED[path](), "run `make generate`"


def test_what_is_printed_is_the_crd_without_anchors() -> None:
    assert yaml.safe_load(crd_text()) == crd()
    assert "&id" not in crd_text()


def test_the_crd_fits_into_the_annotation_of_a_client_side_apply() -> None:
    assert len(crd_text()) < 110_000


@dataclass(frozen=True)
class Inner:
    """An inner group.

    Which nobody needs to know more of.
    """

    size: Quantity = field(default=Quantity("1Gi"))
    """How much."""


@dataclass(frozen=True)
class Plain:
    """A group in which nothing is filled in."""

    word: Annotated[str, Pattern("^[a-z]+$", 8)] | None = None
    """A word,
    over two lines."""


@dataclass(frozen=True)
class Sample:
    """One field of each kind."""

    name: str
    """Its name."""
    count: Annotated[int, Bounds(1, 9)] = 2
    """How many."""
    wait_time: Duration | None = None
    """How long."""
    choice: Literal["a", "b"] = "a"
    """Which."""
    number_or_auto: Annotated[int | Literal["auto"], Bounds(0, 5)] = "auto"
    """How many, or auto."""
    inner: Inner = field(default_factory=Inner)
    plain: Plain = field(default_factory=Plain)
    items: Annotated[tuple[Plain, ...], Items(3, unique_by="the_key")] = ()
    """Several."""
    anything: dict[str, Any] = field(default_factory=dict)
    """Passed through."""


SAMPLE = group_schema(Sample)["properties"]


def test_what_has_no_default_is_required() -> None:
    assert group_schema(Sample)["required"] == ["name"]
    assert "required" not in group_schema(Plain)


def test_a_field_is_described_by_its_docstring_or_else_by_its_groups_first_paragraph() -> None:
    assert SAMPLE["inner"]["description"] == "An inner group."
    assert SAMPLE["plain"]["properties"]["word"]["description"] == "A word, over two lines."


def test_bounds_patterns_and_choices_are_those_of_the_type() -> None:
    assert SAMPLE["count"] == {"description": "How many.", "type": "integer", "minimum": 1, "maximum": 9, "default": 2}
    word = SAMPLE["plain"]["properties"]["word"]
    assert (word["pattern"], word["maxLength"]) == ("^[a-z]+$", 8)
    assert SAMPLE["choice"] == {"description": "Which.", "type": "string", "enum": ["a", "b"], "default": "a"}
    assert SAMPLE["numberOrAuto"]["pattern"] == "^(auto)$"
    assert SAMPLE["waitTime"]["type"] == "string"


def test_a_list_of_groups_is_a_map_by_its_key() -> None:
    items = {key: value for key, value in SAMPLE["items"].items() if key.startswith(("max", "x-"))}
    assert items == {"maxItems": 3, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["theKey"]}


def test_an_object_is_passed_through() -> None:
    assert SAMPLE["anything"]["x-kubernetes-preserve-unknown-fields"]


def test_defaults_are_filled_in_where_they_say_something() -> None:
    assert {key: schema["default"] for key, schema in SAMPLE.items() if "default" in schema} == {
        "count": 2,
        "choice": "a",
        "numberOrAuto": "auto",
        "inner": {},
    }
    assert SAMPLE["inner"]["properties"]["size"]["default"] == "1Gi"


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a schema by its path, at every depth."""
    for name, below in schema.get("properties", {}).items():
        yield f"{path}.{name}", below
        yield from fields(below, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


FIELDS = dict(fields(SCHEMA, ""))


def test_every_field_is_described() -> None:
    own = {path: schema for path, schema in FIELDS.items() if path.startswith((".spec", ".status"))}
    assert len(own) > 300
    assert [path for path, schema in own.items() if not schema.get("description")] == []


def test_no_empty_default_is_stored() -> None:
    assert [path for path, schema in FIELDS.items() if schema.get("default") == []] == []
    empty = [path for path, schema in FIELDS.items() if schema.get("default") == {}]
    assert [path for path in empty if not any("default" in each for each in FIELDS[path]["properties"].values())] == []


def test_kubernetes_own_objects_are_passed_through_in_every_pod() -> None:
    pods = ("spec.pod", "spec.router.pod", "spec.disaggregation.prefill.pod", "spec.disaggregation.decode.pod")
    for pod in pods:
        for name in ("affinity", "securityContext"):
            assert FIELDS[f".{pod}.{name}"]["x-kubernetes-preserve-unknown-fields"]


def test_conditions_and_roles_are_maps_that_can_be_applied_one_entry_at_a_time() -> None:
    keys = {path: FIELDS[f".status.{path}"]["x-kubernetes-list-map-keys"] for path in ("conditions", "roles")}
    assert keys == {"conditions": ["type"], "roles": ["role"]}


def test_the_reference_has_a_section_for_each_group_once_and_links_to_it() -> None:
    lines = page().splitlines()
    sections = [line for line in lines if line.startswith("## ")]
    assert len(sections) == len(set(sections))
    assert "## PodSpec" in sections
    assert any("| `pod` | [PodSpec](#podspec) |" in line for line in lines)


def test_the_reference_has_every_key_of_the_manifest() -> None:
    named = {line.split("`")[1] for line in page().splitlines() if line.startswith("| `")}
    assert {
        path.rpartition(".")[2].removesuffix("[]") for path in FIELDS if path.startswith((".spec.", ".status."))
    } <= named
