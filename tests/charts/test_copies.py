"""What the chart repeats of the rest of the tree, because Helm cannot read outside the chart's folder, is the same."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from tests.controlplane.test_operator_process import ROLE_RULES

from kvasir_operator.api import labels
from kvasir_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvasir"
TEMPLATES = CHART / "templates"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rules_of(block: str) -> list[dict[str, Any]]:
    """The plain YAML between `define` and `end`."""
    text = (TEMPLATES / "_rules.tpl").read_text()
    found = re.search(rf'{{{{- define "{block}" -}}}}\n(.*?){{{{- end }}}}', text, re.DOTALL)
    assert found, f"_rules.tpl defines no {block}"
    rules: list[dict[str, Any]] = yaml.safe_load(found[1])
    return rules


def permissions(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_crds_are_copied_byte_for_byte() -> None:
    assert files(CHART / "files" / "crds") == files(ROOT / "crds"), "cp crds/*.yaml charts/kvasir/files/crds/"


def test_chart_and_package_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_operators_rights_are_those_that_its_own_tests_find_to_be_enough() -> None:
    chart = rules_of("kvasir.serviceRules") + rules_of("kvasir.leaseRules")
    assert permissions(chart) == permissions(ROLE_RULES)


def test_the_operator_has_every_flag_of_the_deployment() -> None:
    args = (TEMPLATES / "deployment.yaml").read_text().partition("args:")[2].partition("env:")[0]
    flags = {flag.replace("-", "_") for flag in re.findall(r"- --([a-z-]+)", args)}
    assert flags
    assert flags <= set(OperatorSettings.__dataclass_fields__)


def test_ports_and_labels_are_the_operators_own() -> None:
    deployment = (TEMPLATES / "deployment.yaml").read_text()
    monitors = (TEMPLATES / "monitors.yaml").read_text()
    assert f"{{name: metrics, containerPort: {labels.OPERATOR_PORT}" in deployment
    assert f"{{key: {labels.ROLE_LABEL}," in monitors
    [(left_out, value)] = labels.monitoring_labels("none").items()
    assert f"{{key: {left_out}, operator: NotIn, values: [{value}]}}" in monitors
    roles = (labels.ROLE_SERVE, labels.ROLE_PREFILL, labels.ROLE_DECODE, labels.ROLE_ROUTER)
    assert set(re.findall(r'"roles" \(list (.*?)\)', monitors)) == {
        " ".join(f'"{role}"' for role in roles[:3]),
        f'"{roles[3]}"',
    }


def test_the_operator_may_reach_the_port_on_which_engines_tell_their_load() -> None:
    policy = (TEMPLATES / "networkpolicy.yaml").read_text()
    roles = f"{labels.ROLE_SERVE}, {labels.ROLE_PREFILL}, {labels.ROLE_DECODE}"
    assert f"{{port: {labels.ENGINE_HTTP_PORT}, protocol: TCP}}" in policy
    assert f"{{key: {labels.ROLE_LABEL}, operator: In, values: [{roles}]}}" in policy
