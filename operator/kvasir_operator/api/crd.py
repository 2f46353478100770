"""The CustomResourceDefinition of InferenceServices, made from the dataclasses of the manifest and its status."""

from typing import Any

import yaml

from kvasir_operator.api import labels
from kvasir_operator.api.manifests import PlainDumper
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.api.rules import rules_of
from kvasir_operator.api.schema import Schema, class_description, group_schema, validations
from kvasir_operator.api.service_status import ServiceStatus

_HEADER = "# Made by `make generate` from operator/kvasir_operator/api: edit the dataclasses and rules there.\n"
_READY = '.status.conditions[?(@.type=="Ready")]'
# Column, what it shows, its type, and whether only `-o wide` has it.
_COLUMNS = (
    ("Ready", ".status.ready", "string", False),
    ("Phase", ".status.phase", "string", False),
    ("Reason", f"{_READY}.reason", "string", False),
    ("URL", ".status.url", "string", False),
    ("Age", ".metadata.creationTimestamp", "date", False),
    ("Source", ".spec.model.source", "string", True),
    ("Message", f"{_READY}.message", "string", True),
)


_NO_FOLDING = 1_000_000
# Characters of a part of the schema that is written on one line; more would be hard to read, less makes a large file.
_MAX_INLINE_LENGTH = 300


def crd_text() -> str:
    """The file under crds/."""
    return _HEADER + yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=_NO_FOLDING, default_flow_style=None)


def crd() -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{labels.PLURAL}.{labels.GROUP}"},
        "spec": {
            "group": labels.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": labels.KIND,
                "listKind": f"{labels.KIND}List",
                "plural": labels.PLURAL,
                "singular": labels.SINGULAR,
                "shortNames": [labels.SHORT_NAME],
                "categories": ["kvasir"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": labels.VERSION,
        "served": True,
        "storage": True,
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if is_wide else {})}
            for name, path, kind, is_wide in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": _schema()},
    }


def _schema() -> Schema:
    return {
        "description": class_description(InferenceService),
        "type": "object",
        "required": ["spec"],
        **validations(rules_of(InferenceService)),
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": group_schema(ServiceSpec),
            "status": group_schema(ServiceStatus),
        },
    }


class _Dumper(PlainDumper):
    """Writes small parts on one line."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        is_small = len(str(mapping)) <= _MAX_INLINE_LENGTH
        return super().represent_mapping(tag, mapping, flow_style or is_small)
