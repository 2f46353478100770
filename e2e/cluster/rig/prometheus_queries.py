"""What a test asks the rig's Prometheus, from the machine, through the relay."""

import json
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from e2e.cluster.rig.layout import PROMETHEUS_PORT, RELAY_ADDRESS

URL = f"http://{RELAY_ADDRESS}:{PROMETHEUS_PORT}"
URL_FOR_PODS = f"http://prometheus.monitoring:{PROMETHEUS_PORT}"
RECENT = "10s"
"""Some of the rig's scrape intervals."""


@dataclass(frozen=True)
class Sample:
    labels: dict[str, str]
    value: float


def query(expression: str) -> list[Sample]:
    """The instant vector of an expression. Raises OSError while Prometheus is stopped."""
    result = _get("query", query=expression)["result"]
    return [Sample(each["metric"], float(each["value"][1])) for each in result]


def being_scraped(series: str) -> str:
    """The expression of those of a selector's series that were scraped of late.

    With a PodMonitor its job goes, and whatever targets the job has then leave their series without a stale marker: a
    query finds their last samples for five minutes more.
    """
    return f"last_over_time({series}[{RECENT}])"


def active_targets() -> list[dict[str, Any]]:
    """Each with its `labels`, its `health` (up, down, unknown) and its `lastError`."""
    targets: list[dict[str, Any]] = _get("targets", state="active")["activeTargets"]
    return targets


def rule_health() -> dict[str, str]:
    """By the rule's name: ok, err, or unknown as long as it was not evaluated."""
    groups = _get("rules")["groups"]
    return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def _get(path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{URL}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
        return json.load(answer)["data"]
