"""The chart's rules read series that are exported, and every alert has its runbook and its values."""

import json
import re

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import VectorSelector
from tests.charts.chart_alerts import CHART, SETTINGS, alert_rules, rule_groups
from tests.contract.exported_series import exported_names

from kvasir_router.metrics import Metrics

TEXT = (CHART / "files" / "alerts.yaml").read_text()
RUNBOOKS = (CHART / "RUNBOOKS.md").read_text()
RULES = [rule for group in rule_groups() for rule in group["rules"]]
ALERTS = list(alert_rules())
FIRST_BYTE = "kvasir_router_time_to_first_byte_seconds"


def series_of(expression: str) -> set[str]:
    """Names of all series that an expression reads."""
    names: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, VectorSelector):
            assert node.name is not None
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return names


@pytest.fixture(scope="module")
def exported() -> set[str]:
    return exported_names()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_reads_series_that_are_exported_or_recorded(rule: dict[str, str], exported: set[str]) -> None:
    read = series_of(rule["expr"])
    assert read
    assert read - exported - {rule["record"] for rule in RULES if "record" in rule} == set()


def test_every_mark_is_replaced() -> None:
    assert "@" not in json.dumps(RULES)


def test_every_alert_has_a_runbook_and_every_runbook_is_of_an_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == ALERTS


def test_every_alert_can_be_tuned_or_switched_off_and_is_on() -> None:
    assert list(SETTINGS["alerts"]) == ALERTS
    assert all(each["enabled"] and each["for"] and each["labels"] for each in SETTINGS["alerts"].values())


def test_a_threshold_is_a_value_of_every_alert_that_compares_with_one() -> None:
    using = [block.partition("\n")[0] for block in TEXT.split("- alert: ")[1:] if "@threshold@" in block]
    assert set(using) == {name for name, each in SETTINGS["alerts"].items() if "threshold" in each}


def test_the_slo_names_a_bound_of_the_routers_histogram() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    for key in ("monitoring", "prometheusRule", "slo", "timeToFirstToken", "seconds"):
        schema = schema["properties"][key]
    allowed = schema["enum"]
    [matcher] = set(re.findall(r'le=~"@ttftSeconds@(\S+?)"', TEXT))
    for bound in first_byte_bounds():
        assert [each for each in allowed if re.fullmatch(f"{each}{matcher}", bound)] == [float(bound)]
    assert len(allowed) == len(first_byte_bounds())


def first_byte_bounds() -> list[str]:
    """As the label `le` has them, without the last, +Inf."""
    router = Metrics()
    router.time_to_first_byte("chat").observe(1.0)
    families = text_string_to_metric_families(router.render().decode())
    [family] = [family for family in families if family.name == FIRST_BYTE]
    bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
    return bounds[:-1]


def test_runbooks_ask_for_series_that_are_exported_or_recorded(exported: set[str]) -> None:
    asked = set(re.findall(r"[\w:]*\bkvasir_[\w:]+", RUNBOOKS))
    assert asked - exported - {rule["record"] for rule in RULES if "record" in rule} == set()
