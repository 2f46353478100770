"""What is rendered as a LeaderWorkerSet, before the schema of the project's own CRD: nothing is refused or dropped.

The other tests here have a short CRD in its place, whose pod templates hold anything.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from e2e.leader_worker_set.module import crd_file
from jsonschema import Draft4Validator

from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, KubeObject
from kvasir_operator.resources.engine_group import engine_group

from .conftest import LEADER_WORKER_SETS
from .test_rendered_objects import DOWNLOADED, EVERYTHING, GROUPS, SETTINGS, SPLIT, service

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def crd() -> KubeObject:
    found: KubeObject = yaml.load(crd_file().read_text(), Loader=yaml.CSafeLoader)
    return found


@pytest.fixture(scope="module")
def validator(crd: KubeObject) -> Draft4Validator:
    """Of what an API server keeps of an object; it drops fields that the schema does not name."""
    [version] = [each for each in crd["spec"]["versions"] if each["storage"]]
    return Draft4Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: Schema) -> Schema:
    """Refuses unknown fields. Metadata, which the API server checks itself, stays open."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = dict(schema)
    if "properties" in schema:
        found["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            found[key] = closed(schema[key])
    return found


def sets(spec: dict[str, Any]) -> list[KubeObject]:
    """One of each role of groups, which avoids a node."""
    longest = service("models", "a" * 63, **spec)
    grouped = [role for role in engine_roles(longest, SETTINGS.defaults) if role.is_grouped]
    group = WantedGroup(0, ("n1",), LEADER_WORKER_SET)
    return [engine_group(longest, role, "0123456789", group, SETTINGS) for role in grouped]


@pytest.mark.parametrize(
    "spec",
    [GROUPS, GROUPS | EVERYTHING, GROUPS | {"model": DOWNLOADED}, SPLIT],
    ids=["groups", "everything", "downloaded", "a role of groups"],
)
def test_the_projects_own_schema_takes_all_that_is_rendered(validator: Draft4Validator, spec: dict[str, Any]) -> None:
    rendered = sets(spec)

    assert rendered
    for each in rendered:
        assert [error.message for error in validator.iter_errors(each)] == []


def test_the_schema_refuses_what_it_does_not_know(validator: Draft4Validator) -> None:
    [first, *_] = sets(GROUPS)
    first["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    first["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["comand"] = []

    assert len(list(validator.iter_errors(first))) == 2


def test_the_short_crd_has_the_fields_of_the_projects_own(crd: KubeObject) -> None:
    short: KubeObject = yaml.safe_load(LEADER_WORKER_SETS.read_text())

    def names(found: KubeObject) -> tuple[str, str, str]:
        return found["spec"]["group"], found["spec"]["names"]["plural"], found["spec"]["versions"][0]["name"]

    assert names(short) == names(crd)
    assert is_within(schema_of(short), schema_of(crd))


def schema_of(found: KubeObject) -> Schema:
    schema: Schema = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def is_within(short: Schema, whole: Schema) -> bool:
    """Whether each field of the one is in the other, with the same default; enums may be of another release."""
    is_same = short["type"] == whole["type"] and short.get("default", whole.get("default")) == whole.get("default")
    parts = short.get("properties", {})
    return is_same and all(
        name in whole["properties"] and is_within(each, whole["properties"][name]) for name, each in parts.items()
    )
