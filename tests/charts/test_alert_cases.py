"""Alerts fire when they must and only then: `promtool test rules` runs tests/charts/alerts/ on the chart's rules.

The cases of a group of rules are in files of its name.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.rig.debian import promtool_program
from tests.charts.chart_alerts import alert_rules, rule_groups

FILES = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
CASES: dict[Path, dict[str, Any]] = {file: yaml.safe_load(file.read_text()) for file in FILES}
NEEDS_NO_SERIES = "KvasirOperatorDown"

Case = dict[str, Any]
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def promtool(file: Path, cases: list[Case], folder: Path) -> str:
    """What is wrong; nothing where every case holds. Evaluated as often as `file` says."""
    rules, tests = folder / "rules.json", folder / "cases.json"
    name = f"kvasir-{file.stem.partition('_')[0]}"
    rules.write_text(json.dumps({"groups": [group for group in rule_groups() if group["name"] == name]}))
    tests.write_text(json.dumps({**CASES[file], "rule_files": [str(rules)], "tests": cases}))
    ended = subprocess.run([promtool_program(), "test", "rules", tests], capture_output=True, text=True, timeout=240)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


@each_file
def test_alerts_fire_after_their_time_and_not_below_their_bounds(file: Path, tmp_path: Path) -> None:
    assert promtool(file, CASES[file]["tests"], tmp_path) == ""


@each_file
def test_an_alert_is_silent_where_one_of_its_series_is_missing(file: Path, tmp_path: Path) -> None:
    lacking = [each for case in CASES[file]["tests"] for each in without_each_series(case)]
    assert lacking
    assert promtool(file, lacking, tmp_path) == ""


def test_every_alert_has_cases_in_which_it_fires_and_in_which_it_never_does() -> None:
    cases = [case for file in FILES for case in CASES[file]["tests"]]
    firing = {case["alert_rule_test"][0]["alertname"] for case in cases if first_firing(case) is not None}
    silent = {case["alert_rule_test"][0]["alertname"] for case in cases if first_firing(case) is None}
    assert firing == silent == set(alert_rules())


def first_firing(case: Case) -> dict[str, Any] | None:
    return next((expected for expected in case["alert_rule_test"] if "exp_alerts" in expected), None)


def without_each_series(case: Case) -> Iterator[Case]:
    """Of a case in which an alert fires: the same without one of its series, and with no alert."""
    firing = first_firing(case)
    if firing is None or firing["alertname"] == NEEDS_NO_SERIES:
        return
    silent = {"alertname": firing["alertname"], "eval_time": firing["eval_time"]}
    names = [each["series"].partition("{")[0] for each in case["input_series"]]
    for missing in sorted(set(names)):
        rest = [each for name, each in zip(names, case["input_series"], strict=True) if name != missing]
        yield {**case, "name": f"without {missing}", "input_series": rest, "alert_rule_test": [silent]}
