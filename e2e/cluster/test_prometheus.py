"""Prometheus beside the cluster finds pods by PodMonitors, evaluates PrometheusRules, and can be stopped."""

import urllib.error
import urllib.parse
from collections.abc import Iterator

import pytest
import yaml
from e2e.cluster.conftest import Cluster
from e2e.cluster.hello import deployment
from e2e.cluster.rig.faults import start, stop
from e2e.cluster.rig.prometheus_queries import URL_FOR_PODS, active_targets, query, rule_health
from tests.controlplane.processes import wait_until

MONITOR = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PodMonitor",
    "metadata": {"name": "dns", "namespace": "kube-system"},
    "spec": {
        "selector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": ["kube-dns", "other"]}]},
        "podMetricsEndpoints": [
            {
                "port": "metrics",
                "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
            }
        ],
    },
}
RULE = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PrometheusRule",
    "metadata": {"name": "dns", "namespace": "kube-system"},
    "spec": {"groups": [{"name": "dns", "rules": [{"alert": "DnsAnswers", "expr": "up == 1"}]}]},
}


@pytest.fixture(scope="module")
def monitored(cluster: Cluster) -> Iterator[None]:
    cluster.apply(MONITOR, RULE)
    wait_until(is_scraped, 60, "both replicas of CoreDNS to be scraped")
    yield
    cluster.kubectl("delete", "-f", "-", text=yaml.safe_dump_all([MONITOR, RULE]))
    wait_until(lambda: not active_targets(), 30, "no targets to be left")


def is_scraped() -> bool:
    return [each["health"] for each in active_targets()] == ["up", "up"]


def test_series_carry_the_labels_of_their_pods(monitored: None) -> None:
    samples = query("coredns_build_info")
    assert {sample.labels["namespace"] for sample in samples} == {"kube-system"}
    assert {sample.labels["job"] for sample in samples} == {"kube-system/dns"}
    assert len({sample.labels["node"] for sample in samples}) == 2


def test_alerts_of_rules_are_evaluated(monitored: None) -> None:
    wait_until(lambda: rule_health() == {"DnsAnswers": "ok"}, 30, "the rule to be evaluated")
    wait_until(lambda: len(query('ALERTS{alertname="DnsAnswers"}')) == 2, 30, "both alerts to fire")


def test_pods_reach_it_by_its_name(cluster: Cluster) -> None:
    cluster.apply(deployment("asking", 1))
    [pod] = wait_until(cluster.ready("asking", 1), 60, "a pod to be ready")
    url = urllib.parse.urlsplit(URL_FOR_PODS)
    [address] = cluster.resolve(pod, url.hostname)
    assert "Prometheus Server is Ready" in cluster.ask(pod, address, url.port, "/-/ready")


def test_it_can_be_stopped_and_started(monitored: None) -> None:
    stop("prometheus")
    with pytest.raises((ConnectionError, urllib.error.URLError)):
        query("up")
    start("prometheus")
    wait_until(is_answering, 30, "Prometheus to answer again")
    wait_until(is_scraped, 60, "both replicas of CoreDNS to be scraped again")


def is_answering() -> bool:
    try:
        query("up")
    except OSError:
        return False
    return True
