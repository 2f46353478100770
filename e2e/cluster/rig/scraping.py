"""PodMonitor and PrometheusRule, the Prometheus operator's kinds, as configuration of a Prometheus: pure functions.

Only what is translated may be used: an endpoint with any other field is refused by name.
"""

import re
from typing import Any

from e2e.cluster.rig.discovery import META, KubeObject, label

Config = dict[str, Any]

INTERVAL = "2s"
"""Where a monitor names none: short, so that no scenario waits for it."""
COPIED = {
    "path": "metrics_path",
    "scheme": "scheme",
    "interval": "scrape_interval",
    "scrapeTimeout": "scrape_timeout",
    "honorLabels": "honor_labels",
    "params": "params",
}


class UntranslatedError(Exception):
    """A monitor uses what this translation does not know."""


def prometheus_config(pod_monitors: list[KubeObject], pods_file: str, rule_files: str) -> Config:
    configs = [config for monitor in pod_monitors for config in scrape_configs(monitor, pods_file)]
    return {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [rule_files],
        "scrape_configs": sorted(configs, key=lambda config: str(config["job_name"])),
    }


def scrape_configs(monitor: KubeObject, pods_file: str) -> list[Config]:
    """One for each endpoint."""
    spec, metadata = monitor["spec"], monitor["metadata"]
    name = f"{metadata['namespace']}/{metadata['name']}"
    return [
        {
            "job_name": f"podMonitor/{name}/{number}",
            "file_sd_configs": [{"files": [pods_file]}],
            **endpoint_options(name, endpoint),
            "relabel_configs": [
                *namespaces(spec.get("namespaceSelector", {}), metadata["namespace"]),
                *selection(spec["selector"]),
                {"action": "drop", "source_labels": [f"{META}_pod_phase"], "regex": "(Failed|Succeeded)"},
                _keep(f"{META}_pod_container_port_name", re.escape(endpoint["port"])),
                *pod_labels(name),
                {"target_label": "endpoint", "replacement": endpoint["port"]},
                *map(snake_case, endpoint.get("relabelings", [])),
            ],
            "metric_relabel_configs": [snake_case(each) for each in endpoint.get("metricRelabelings", [])],
        }
        for number, endpoint in enumerate(spec["podMetricsEndpoints"])
    ]


def namespaces(selector: Config, own: str) -> list[Config]:
    if selector.get("any"):
        return []
    return [_keep(f"{META}_namespace", f"({'|'.join(selector.get('matchNames') or [own])})")]


def endpoint_options(monitor: str, endpoint: Config) -> Config:
    unknown = endpoint.keys() - COPIED.keys() - {"port", "relabelings", "metricRelabelings"}
    if unknown or "port" not in endpoint:
        raise UntranslatedError(
            f"PodMonitor {monitor} has an endpoint with {sorted(endpoint)}; e2e/cluster/rig/scraping.py wants `port` "
            f"and knows {sorted(COPIED)}, relabelings and metricRelabelings: teach it the others"
        )
    return {COPIED[field]: value for field, value in endpoint.items() if field in COPIED}


def selection(selector: Config) -> list[Config]:
    rules = [_keep(label(name), re.escape(value)) for name, value in selector.get("matchLabels", {}).items()]
    return rules + [expression(each) for each in selector.get("matchExpressions", [])]


def expression(requirement: Config) -> Config:
    key, operator = requirement["key"], requirement["operator"]
    values = "|".join(map(re.escape, requirement.get("values", [])))
    match operator:
        case "In":
            return _keep(label(key), f"({values})")
        case "NotIn":
            return {"action": "drop", "source_labels": [label(key)], "regex": f"({values})"}
        case "Exists":
            return _keep(label(key, "labelpresent"), "true")
        case _:
            return {"action": "drop", "source_labels": [label(key, "labelpresent")], "regex": "true"}


def pod_labels(job: str) -> list[Config]:
    sources = {"namespace": "namespace", "container": "pod_container_name", "pod": "pod_name"}
    labels = [{"source_labels": [f"{META}_{source}"], "target_label": target} for target, source in sources.items()]
    return [*labels, {"target_label": "job", "replacement": job}]


def snake_case(relabeling: Config) -> Config:
    """Prometheus spells sourceLabels source_labels, and its actions in small letters."""
    spelled = {
        re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name): value for name, value in relabeling.items()
    }
    if "action" in spelled:
        spelled["action"] = spelled["action"].lower()
    return spelled


def rule_files(rules: list[KubeObject]) -> dict[str, Config]:
    """Content by file name: one file for each PrometheusRule, because groups in one file need different names."""
    return {
        f"{rule['metadata']['namespace']}.{rule['metadata']['name']}.json": {"groups": rule["spec"].get("groups", [])}
        for rule in rules
    }


def _keep(source: str, regex: str) -> Config:
    return {"action": "keep", "source_labels": [source], "regex": regex}
