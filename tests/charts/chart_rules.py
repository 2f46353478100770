"""The rules of the chart's roles, read from its templates: plain YAML between `define` and `end`."""

import re
from pathlib import Path
from typing import Any

import yaml

TEMPLATES = Path(__file__).parents[2] / "charts" / "kvasir" / "templates"

Permission = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def rules_of(block: str) -> list[dict[str, Any]]:
    """As of a release that is named as its chart."""
    text = (TEMPLATES / "_rules.tpl").read_text().replace('{{ include "kvasir.gatewayName" . }}', "kvasir-gateway")
    found = re.search(rf'{{{{- define "{block}" -}}}}\n(.*?){{{{- end }}}}', text, re.DOTALL)
    assert found, f"_rules.tpl defines no {block}"
    rules: list[dict[str, Any]] = yaml.safe_load(found[1])
    return rules


def operator_rules(router_role: str) -> list[dict[str, Any]]:
    """Of an operator that serves one namespace and may bind the Role of routers there."""
    bind = {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles"], "verbs": ["bind"]}
    return [*rules_of("kvasir.serviceRules"), *rules_of("kvasir.leaseRules"), {**bind, "resourceNames": [router_role]}]


def permissions(rules: list[dict[str, Any]]) -> set[Permission]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
