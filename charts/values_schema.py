#!/usr/bin/env python3
"""Writes into values.schema.json of the chart what the operator takes, so that Helm refuses what would stop it.

Definitions are made from the dataclasses and flags that read the values, what is required from values.yaml; all else is
written in the file itself. A test compares the two.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from charts.values_table import CHART

from kvasir_operator.api.fields import without_none
from kvasir_operator.api.model import PodSpec, ResourcesSpec, RouterResources
from kvasir_operator.api.schema import group_schema
from kvasir_operator.settings import OperatorSettings
from kvasir_router.config import RouterConfig, parse_duration, parse_origin, parse_remote_min_tokens, parse_size

Schema = dict[str, Any]


def _is(key: str, value: str) -> Schema:
    """Or is absent."""
    return {"properties": {key: {"const": value}}}


def _has(key: str, value: str) -> Schema:
    return {"required": [key], **_is(key, value)}


LINE_LENGTH = 120
FILE = CHART / "values.schema.json"
TEMPLATES = CHART / "templates"
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
    # No schema compares two amounts: the chart's templates do.
    "cpu, which a node must have free, is above cpuLimit": {},
    "labels under serving.kvasir.dev/": {
        "properties": {"labels": {"propertyNames": {"not": {"pattern": r"^serving\.kvasir\.dev/"}}}}
    },
}
# Flags that name files, other ports than the template's, or what a gateway is not told.
_NOT_IN_A_POD = {"kubeconfig", "host", "port", "admin-host", "endpoint", "prefill-endpoint", "decode-endpoint"}
_NOT_IN_A_POD |= {"endpoints-service", "model", "model-alias"}
# Values that the router reads itself, as regular expressions.
_READ = {
    parse_size: "([0-9]{1,18}|[0-9]{1,9}(k|M|G|Ki|Mi|Gi))",
    parse_remote_min_tokens: "(auto|[0-9]{1,9})",
    parse_origin: r"(\*|https?://[^/\s]+)",
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
        "operatorFlags": flags(OperatorSettings, "deployment.yaml"),
        "routerFlags": flags(RouterConfig, "gateway/deployment.yaml"),
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
    validations = schema.get("x-kubernetes-validations", ())
    rules = [rule for each in validations if (rule := _rule(each["rule"], each["message"]))]
    return {**found, **({"allOf": rules} if rules else {})}


def _rule(cel: str, message: str) -> Schema:
    if counted := _EXACTLY_ONE.search(cel):
        return {"oneOf": [{"required": [name]} for name in _FIELD.findall(counted[1])]}
    if refused := _NOT_MATCHED.fullmatch(cel):
        return {"properties": {refused[1]: {"not": {"pattern": refused[2]}}}}
    if wanted := _KEYS_MATCHED.fullmatch(cel):
        return {"properties": {wanted[1]: {"propertyNames": {"pattern": wanted[2]}}}}
    return next(schema for begin, schema in _RULES.items() if message.startswith(begin))


def flags(config: type, template: str) -> Schema:
    """Those that are derived from a dataclass, each with a value that it takes, and not given by the chart itself."""
    given = set(re.findall(r'^ +- "?--(?:no-)?([a-z-]+)', (TEMPLATES / template).read_text(), re.MULTILINE))
    hints = get_type_hints(config)
    left = [
        f"{name}={_value(each.metadata, without_none(hints[each.name])[0])}"
        for each in dataclasses.fields(config)
        if each.metadata and (name := each.name.replace("_", "-")) not in given | _NOT_IN_A_POD
    ]
    return {"type": "array", "uniqueItems": True, "items": {"type": "string", "pattern": f"^--({'|'.join(left)})$"}}


def _value(metadata: Mapping[str, Any], kind: Any) -> str:
    """Of one flag, as a regular expression."""
    least, most, read = metadata["least"], metadata["most"], metadata.get("read")
    if get_origin(kind) is Literal:
        return f"({'|'.join(get_args(kind))})"
    if read is parse_duration:
        hours, minutes, seconds = (_decimal(digits, least > 0) for digits in (5, 7, 9))
        return f"({hours}h|{minutes}m|{seconds}(ms|s)?)"
    if read is not None:
        return _READ[read]
    return _decimal(len(str(most)) - 1, least > 0) if kind is float else f"({_whole(least, most)})"


def _decimal(num_digits: int, is_above_zero: bool) -> str:
    if is_above_zero:
        return rf"([1-9][0-9]{{0,{num_digits - 1}}}(\.[0-9]{{1,9}})?|0\.[0-9]{{0,8}}[1-9][0-9]{{0,8}})"
    return rf"[0-9]{{1,{num_digits}}}(\.[0-9]{{1,9}})?"


def _whole(least: int, most: int) -> str:
    """From one of one digit to one of several."""
    text = str(most)
    shorter = f"[{least}-9]|[1-9][0-9]{{1,{len(text) - 2}}}"
    below = [
        f"{text[:place]}[{int(place == 0)}-{int(digit) - 1}][0-9]{{{len(text) - place - 1}}}"
        for place, digit in enumerate(text)
        if int(digit) > int(place == 0)
    ]
    return "|".join((shorter, *below, text))


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
