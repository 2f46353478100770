#!/usr/bin/env python3
"""Writes into values.schema.json of the chart what the operator takes, so that Helm refuses what would stop it.

Definitions are made from the dataclasses and flags that read the values, what is required from values.yaml; all else is
written in the file itself. A test compares the two.
"""

import dataclasses
import json
import re
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from charts.values_table import CHART

from kvasir_operator.api.fields import without_none
from kvasir_operator.api.model import PodSpec, ResourcesSpec, RouterResources
from kvasir_operator.api.schema import group_schema
from kvasir_operator.settings import OperatorSettings
from kvasir_router.config import RouterConfig

Schema = dict[str, Any]


def _is(key: str, value: str) -> Schema:
    """Or is absent."""
    return {"properties": {key: {"const": value}}}


def _has(key: str, value: str) -> Schema:
    return {"required": [key], **_is(key, value)}


LINE_LENGTH = 120
FILE = CHART / "values.schema.json"
_KEPT = ("type", "properties", "required", "items", "enum", "minimum", "maximum", "maxItems", "maxProperties")
_KEPT += ("maxLength", "pattern", "anyOf", "additionalProperties")
_EXACTLY_ONE = re.compile(r"\[(has\(self\.\w+\)(?:, has\(self\.\w+\))*)\]\.filter")
_FIELD = re.compile(r"has\(self\.(\w+)\)")
# Definitions of what a null takes fields out of, or switches off.
_USERS_MAPS = ("securityContext", "containerResources", "engineDefaults", "routerDefaults")
_ALERTS = ("alert", "alertAbove")
# The rules across fields that are no count of them, by the begin of their messages.
_RULES: dict[str, Schema] = {
    "operator Exists takes no value": {
        "allOf": [
            {"anyOf": [_is("operator", "Equal"), _is("value", "")]},
            {"anyOf": [{"required": ["key"], "not": _is("key", "")}, _has("operator", "Exists")]},
            {"anyOf": [{"not": {"required": ["tolerationSeconds"]}}, _has("effect", "NoExecute")]},
        ]
    },
    "write value or valueFrom": {"not": {"required": ["value", "valueFrom"]}},
    "KVASIR_ROUTER_SECRET is": {"properties": {"name": {"not": {"const": "KVASIR_ROUTER_SECRET"}}}},
    "labels under serving.kvasir.dev/": {
        "properties": {"labels": {"propertyNames": {"not": {"pattern": r"^serving\.kvasir\.dev/"}}}}
    },
}
# What the text of a rule matches against one field.
_NOT_MATCHED = re.compile(r"!self\.(\w+)\.matches\(r?'(.*)'\)")
_KEYS_MATCHED = re.compile(r"!has\(self\.(\w+)\) \|\| self\.\1\.all\(key, key\.matches\('(.*)'\)\)")


@cache
def definitions() -> dict[str, Schema]:
    pod, resources = strict(group_schema(PodSpec)), strict(group_schema(ResourcesSpec))
    del resources["properties"]["profile"]  # profiles do not build on one another
    for passed_through in ("affinity", "securityContext"):  # which the API server would refuse in every child
        pod["properties"][passed_through] = {"$ref": f"#/definitions/{passed_through}"}
    return {
        "labels": pod["properties"]["nodeSelector"],
        "annotations": pod["properties"]["annotations"],
        "tolerations": pod["properties"]["tolerations"],
        "podSettings": pod,
        "engineResources": resources,
        "routerResources": strict(group_schema(RouterResources)),
        "operatorFlags": flags(OperatorSettings),
        "routerFlags": flags(RouterConfig),
    }


def strict(schema: Schema) -> Schema:
    """A CRD's structural schema as one of JSON, in which unknown keys are refused as the API server refuses them."""
    found = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in found:
        found["properties"] = {key: strict(each) for key, each in found["properties"].items()}
        found["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = strict(found[key])
    if schema.get("x-kubernetes-list-type") == "set":
        found["uniqueItems"] = True
    rules = [_rule(each["rule"], each["message"]) for each in schema.get("x-kubernetes-validations", ())]
    return {**found, **({"allOf": rules} if rules else {})}


def _rule(cel: str, message: str) -> Schema:
    if counted := _EXACTLY_ONE.search(cel):
        return {"oneOf": [{"required": [name]} for name in _FIELD.findall(counted[1])]}
    if refused := _NOT_MATCHED.fullmatch(cel):
        return {"properties": {refused[1]: {"not": {"pattern": refused[2]}}}}
    if wanted := _KEYS_MATCHED.fullmatch(cel):
        return {"properties": {wanted[1]: {"propertyNames": {"pattern": wanted[2]}}}}
    return next(schema for begin, schema in _RULES.items() if message.startswith(begin))


def flags(config: type) -> Schema:
    """Those that are derived from a dataclass, each with a value of its kind."""
    hints = get_type_hints(config)
    texts = (
        _flag(field.name, without_none(hints[field.name])[0]) for field in dataclasses.fields(config) if field.metadata
    )
    return {"type": "array", "items": {"type": "string", "pattern": f"^--({'|'.join(texts)})$"}}


def _flag(name: str, kind: Any) -> str:
    text = name.replace("_", "-")
    if kind is bool:
        return f"(no-)?{text}"
    if get_origin(kind) is Literal:
        return f"{text}=({'|'.join(get_args(kind))})"
    return text + {int: "=[0-9]+", float: r"=[0-9]+(\.[0-9]+)?"}.get(kind, "=.+")


def whole(schema: Schema, values: Any) -> Schema:
    """With what is made here, and required what a null would take out of a template: all but the user's own."""
    made = {**schema, "definitions": {**schema["definitions"], **definitions()}}
    _require(made, values, made["definitions"])
    return made


def _require(schema: Schema, values: Any, known: dict[str, Schema]) -> bool:
    """Whether there must be a value: a list or map that may be empty may be left out too."""
    name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else None
    schema = schema if name is None else known[name]
    if isinstance(values, list):
        return "minItems" in schema
    if not isinstance(values, dict):
        return True
    if name in _USERS_MAPS or "properties" not in schema:
        return False
    if required := [key for key, value in values.items() if _require(schema["properties"][key], value, known)]:
        schema["required"] = required
    return bool(required) and name not in _ALERTS


def text_of(schema: Any, indent: str = "") -> str:
    """As JSON, of which what fits into a line is on one."""
    line = json.dumps(schema)
    if not isinstance(schema, dict) or len(indent) + len(line) < LINE_LENGTH or schema in definitions().values():
        return line
    inner = f"{indent}  "
    parts = (f"{inner}{json.dumps(key)}: {text_of(value, inner)}" for key, value in schema.items())
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def main() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    FILE.write_text(text_of(whole(json.loads(FILE.read_text()), values)) + "\n")


if __name__ == "__main__":
    main()
