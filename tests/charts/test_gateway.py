"""The gateway of the chart is what the other programs take it for: its rights, ports, labels and variables."""

import dataclasses
import re

import yaml
from tests.charts.chart_rules import TEMPLATES, rules_of

from kvasir_operator.api import labels
from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.api.fields import manifest_fields
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.router_command import API_KEYS_FOLDER
from kvasir_operator.resources.services import PEERS_FLAG
from kvasir_operator.settings import OperatorSettings
from kvasir_router.config import RouterConfig, parse_size

HELPERS = (TEMPLATES / "_helpers.tpl").read_text()
DEPLOYMENT = (TEMPLATES / "gateway" / "deployment.yaml").read_text()
VALUES = yaml.safe_load((TEMPLATES.parent / "values.yaml").read_text())["gateway"]


def test_it_may_read_services_and_their_engines_addresses_and_nothing_else() -> None:
    assert rules_of("kvasir.gatewayRules") == [
        {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]


def test_the_operator_is_told_of_it_in_its_own_words() -> None:
    group = HELPERS.partition("\ngateway:\n")[2].partition("{{- end }}")[0]
    assert re.findall(r"^  (\w+):", group, re.MULTILINE) == [field.key for field in manifest_fields(GatewayDefaults)]


def test_both_get_the_secret_by_the_variable_that_the_operator_reads() -> None:
    assert f"- name: {labels.GATEWAY_SECRET_ENV}\n" in HELPERS
    for deployment in (DEPLOYMENT, (TEMPLATES / "deployment.yaml").read_text()):
        assert 'include "kvasir.gatewaySecretEnv"' in deployment


def test_operator_and_gateway_log_in_the_one_format_of_all_pods() -> None:
    for deployment in (DEPLOYMENT, (TEMPLATES / "deployment.yaml").read_text()):
        assert "- --log-format={{ .Values.logFormat }}\n" in deployment


def test_what_a_flag_is_compared_with_is_the_programs_own_default() -> None:
    """Where only one of two is given."""
    router = {field.name: field.default for field in dataclasses.fields(RouterConfig)}
    operator = {field.name: field.default for field in dataclasses.fields(OperatorSettings)}
    calls = re.findall(r'include "kvasir.checkFlags" \(list \S+ "(\w+)\.extraArgs" (.*)\)', HELPERS)
    assert [pod for pod, _ in calls] == ["operator", "gateway"]
    for pod, pairs in calls:
        first, its_default, most, most_default = re.findall(r'"(.+?)"', pairs)
        for name, text in ((first, its_default), (most, most_default)):
            key = name.replace("-", "_")
            assert (router[key] if pod == "gateway" else operator[key]) == (
                parse_size(text) if pod == "gateway" else float(text)
            )


def test_its_ports_are_those_of_every_router() -> None:
    service = (TEMPLATES / "gateway" / "service.yaml").read_text()
    assert f"{{name: http, port: {labels.ROUTER_HTTP_PORT}, targetPort: http" in service
    assert f"{{name: http, containerPort: {labels.ROUTER_HTTP_PORT}," in DEPLOYMENT
    assert f"{{name: admin, containerPort: {labels.ROUTER_ADMIN_PORT}," in DEPLOYMENT
    assert f"--port={labels.ROUTER_HTTP_PORT}\n" in DEPLOYMENT
    assert f"--admin-port={labels.ROUTER_ADMIN_PORT}\n" in DEPLOYMENT


def test_its_pods_find_one_another_as_those_of_a_services_own_router_do() -> None:
    service = (TEMPLATES / "gateway" / "peers-service.yaml").read_text()
    name = '{{ include "kvasir.gatewayPeersName" . }}'
    assert f"name: {name}\n" in service
    assert "clusterIP: None\n  publishNotReadyAddresses: true\n" in service
    assert f"{{name: peers, port: {labels.ROUTER_PEERS_PORT}, targetPort: peers" in service
    assert f"{{name: peers, containerPort: {labels.ROUTER_PEERS_PORT}," in DEPLOYMENT
    assert f"{PEERS_FLAG}={name}.{{{{ .Release.Namespace }}}}.svc:{labels.ROUTER_PEERS_PORT}\n" in DEPLOYMENT


def test_keys_are_mounted_where_its_flag_says() -> None:
    assert f"--api-keys-file={API_KEYS_FOLDER}\n" in DEPLOYMENT
    assert f"mountPath: {API_KEYS_FOLDER}, readOnly: true" in DEPLOYMENT


def test_its_pods_run_under_what_every_pod_of_ours_does() -> None:
    assert VALUES["podSecurityContext"] == sandbox.pod_security_context({})
    assert VALUES["securityContext"] == sandbox.container_security_context({})


def test_it_follows_the_ports_on_which_engines_publish_events() -> None:
    assert f"--kv-events={labels.ENGINE_KV_EVENTS_PORT}:{labels.ENGINE_KV_REPLAY_PORT}\n" in DEPLOYMENT
