"""docs/autoscaling.md shows the questions that are asked, the reasons that there are, and a manifest that holds."""

import re
from pathlib import Path

import pytest
import yaml
from tests.charts.chart_values import validate

from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.queries import Queries
from kvasir_operator.autoscaling.situation import HoldReason
from kvasir_operator.metrics import OperatorMetrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "autoscaling.md").read_text()
VALUES, MANIFEST = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
BY_POD, OF_ROLE, HELD, FORMER_DAYS = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
QUERIES = Queries()


@pytest.mark.parametrize(
    ("block", "queries"),
    [
        (BY_POD, QUERIES.by_pod().values()),
        (OF_ROLE, QUERIES.of_role().values()),
        (HELD, QUERIES.held().values()),
        (FORMER_DAYS, [QUERIES.former_days(120)]),
    ],
    ids=["by pod", "of the role", "held", "former days"],
)
def test_the_page_has_the_questions_that_are_asked(block: str, queries: list[str]) -> None:
    assert block.splitlines() == list(queries)


def test_every_reason_is_on_the_page() -> None:
    assert [each.value for each in (*ScalingReason, *HoldReason) if f"`{each.value}`" not in PAGE] == []


def test_every_series_is_on_the_page_and_no_other() -> None:
    prefix = "kvasir_operator_autoscaling_"
    families = [family for family in OperatorMetrics().registry.collect() if family.name.startswith(prefix)]
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert set(re.findall(rf"^\| `({prefix}\w+)`", PAGE, re.MULTILINE)) == names


def test_the_chart_takes_the_values_and_the_manifest_holds(tmp_path: Path) -> None:
    validate(yaml.safe_load(VALUES))
    (tmp_path / "service.yaml").write_text(MANIFEST)
    [service] = load_manifests(tmp_path / "service.yaml").services
    assert service.spec.autoscaling is not None
