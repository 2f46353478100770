"""Alerts name series that the programs export, and each has a runbook."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.engine_series import engine_registry

from kvasir_operator.metrics import OperatorMetrics
from kvasir_router.metrics import Metrics

CHART = Path(__file__).parents[2] / "charts" / "kvasir"
RULES = (CHART / "templates" / "prometheusrule.yaml").read_text()
RUNBOOKS = (CHART / "RUNBOOKS.md").read_text()
ALERTS = re.findall(r'"name" "(\w+)"', RULES)
SETTINGS = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]["alerts"]


def names_of(registry: CollectorRegistry) -> set[str]:
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The series of all three programs."""
    router = Metrics()
    router.observe_queue(lambda: 0)
    router.observe_endpoints(lambda state: 0)
    families = text_string_to_metric_families(router.render().decode())
    of_router = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}

    engine = engine_registry(tmp_path_factory.mktemp("metrics"))
    return names_of(OperatorMetrics().registry) | names_of(engine) | of_router


def test_alerts_name_exported_series_only(exported: set[str]) -> None:
    used = set(re.findall(r"\bkvasir_\w+", RULES))
    assert used
    assert used - exported == set()


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_runbook(alert: str) -> None:
    assert f"\n## {alert}\n" in RUNBOOKS


def test_every_alert_can_be_tuned_or_switched_off_and_is_on() -> None:
    assert list(SETTINGS) == ALERTS
    assert all(settings["enabled"] and settings["for"] and settings["labels"] for settings in SETTINGS.values())


def test_a_threshold_is_a_value_of_every_alert_that_compares_with_one() -> None:
    used = re.findall(r"\$alerts\.(\w+)\.threshold", RULES)
    assert set(used) == {name for name, settings in SETTINGS.items() if "threshold" in settings}


def test_every_runbook_is_of_an_alert() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOKS, re.MULTILINE) == ALERTS
