"""The chart's rules with its default values, for the whole cluster, as templates/prometheusrule.yaml makes them of
files/alerts.yaml: without Helm, which takes minutes to build. e2e/helm/test_files.py compares with the real one.
"""

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "kvasir"
SETTINGS = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]
RELEASE, NAMESPACE = "kvasir", "kvasir-system"

Rule = dict[str, Any]


def rule_groups() -> list[dict[str, Any]]:
    """Of an installation `kvasir` in `kvasir-system`."""
    slo = SETTINGS["slo"]
    marks = {
        "release": RELEASE,
        "namespace": NAMESPACE,
        "operator": f'namespace="{NAMESPACE}", pod=~"{RELEASE}-operator-[^-]+-[^-]+"',
        "watched": "",
        "availability": slo["availability"],
        "ttftObjective": slo["timeToFirstToken"]["objective"],
        "ttftSeconds": slo["timeToFirstToken"]["seconds"],
        "leastBad": slo["leastBadRequests"],
    }
    text = (CHART / "files" / "alerts.yaml").read_text()
    for mark, value in marks.items():
        text = text.replace(f"@{mark}@", str(value))
    return [{**group, "rules": [*map(_with_settings, group["rules"])]} for group in yaml.safe_load(text)]


def alert_rules() -> dict[str, Rule]:
    """By the alert's name."""
    return {rule["alert"]: rule for group in rule_groups() for rule in group["rules"] if "alert" in rule}


def _with_settings(rule: Rule) -> Rule:
    if "alert" not in rule:
        return rule
    settings = SETTINGS["alerts"][rule["alert"]]
    made: Rule = json.loads(json.dumps(rule).replace("@threshold@", str(settings.get("threshold"))))
    return {**made, "for": settings["for"], "labels": settings["labels"]}
