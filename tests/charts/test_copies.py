"""What the chart repeats of the rest of the tree, because Helm cannot read outside the chart's folder, is the same."""

import re
from collections import defaultdict
from pathlib import Path

from tests.charts.chart_rules import TEMPLATES, operator_rules, permissions, rules_of

from kvasir_operator.api import labels
from kvasir_operator.kube.kinds import LISTED_CHILD_KINDS, POD
from kvasir_operator.kube.leadership import CLUSTER_LEASE, OWN_LEASE
from kvasir_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvasir"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_crds_are_copied_byte_for_byte() -> None:
    assert files(CHART / "files" / "crds") == files(ROOT / "crds"), "cp crds/*.yaml charts/kvasir/files/crds/"


def test_the_operator_may_watch_and_write_every_kind_of_child_and_delete_pods_besides() -> None:
    rules = permissions(rules_of("kvasir.serviceRules"))
    written = {(group, resource) for group, resource, verb in rules if verb == "delete"}
    assert written == {(kind.group, kind.plural) for kind in (*LISTED_CHILD_KINDS, POD)}
    assert {(group, resource) for group, resource, verb in rules if verb == "create"} == written - {("", "pods")} | {
        ("", "secrets"),
        ("", "events"),
    }


def test_no_role_is_made_and_no_secret_listed_by_the_operator() -> None:
    verbs = defaultdict[str, set[str]](set)
    for _, resource, verb in permissions(operator_rules("routers")):
        verbs[resource].add(verb)
    assert verbs["roles"] == {"bind"}
    assert verbs["secrets"] == {"get", "create"}
    assert "configmaps" not in verbs
    assert "endpointslices" not in verbs


def test_the_operator_has_every_flag_of_the_deployment() -> None:
    args = (TEMPLATES / "deployment.yaml").read_text().partition("args:")[2].partition("env:")[0]
    flags = {flag.removeprefix("no-").replace("-", "_") for flag in re.findall(r"- --([a-z-]+)", args)}
    assert flags
    assert flags - {"pod_defaults"} <= set(OperatorSettings.__dataclass_fields__)


def test_every_pod_of_the_chart_keeps_to_nodes_that_its_image_runs_on() -> None:
    templates = {path.relative_to(TEMPLATES): path.read_text() for path in TEMPLATES.rglob("*.yaml")}
    pods = {str(path): text for path, text in templates.items() if "containers:" in text}
    assert set(pods) == {"deployment.yaml", "gateway/deployment.yaml", "helm-test.yaml"}
    for path, text in pods.items():
        assert '{{- with include "kvasir.nodeSelector" (list $ ' in text, path


def test_leases_have_the_names_that_the_operator_asks_for() -> None:
    [named] = [rule["resourceNames"] for rule in rules_of("kvasir.leaseRules") if "resourceNames" in rule]
    assert named == [OWN_LEASE, CLUSTER_LEASE]
    helpers = (TEMPLATES / "_helpers.tpl").read_text()
    assert re.findall(r'"name" "([^"]*)"\) }}', helpers) == named


def test_the_metrics_port_is_the_operators_own() -> None:
    port = labels.OPERATOR_PORT
    assert f"{{name: metrics, containerPort: {port}" in (TEMPLATES / "deployment.yaml").read_text()
    assert f"{{name: metrics, port: {port}, targetPort: metrics" in (TEMPLATES / "service.yaml").read_text()
    assert f".svc:{port}/readyz" in (TEMPLATES / "helm-test.yaml").read_text()


def test_the_operator_may_reach_the_port_on_which_engines_tell_their_load() -> None:
    policy = (TEMPLATES / "networkpolicy.yaml").read_text()
    roles = f"{labels.ROLE_SERVE}, {labels.ROLE_PREFILL}, {labels.ROLE_DECODE}"
    assert f"{{port: {labels.ENGINE_HTTP_PORT}, protocol: TCP}}" in policy
    assert f"{{key: {labels.ROLE_LABEL}, operator: In, values: [{roles}]}}" in policy
