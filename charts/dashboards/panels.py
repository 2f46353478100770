"""The two kinds of panels, made alike: a graph over time, and a number of now with its recent past behind it.

Every panel says in its description what it shows and what to do about it; a test asks for that.
"""

from dataclasses import dataclass

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, Threshold, ThresholdsMode

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAPH_WIDTH, GRAPH_HEIGHT = 8, 8
NUMBER_WIDTH, NUMBER_HEIGHT = 4, 4

COUNT = "short"
PER_SECOND = "reqps"
TOKENS_PER_SECOND = "si:tok/s"
TOKENS = "si:tok"
EVENTS_PER_SECOND = "cps"
SECONDS = "s"
SHARE = "percentunit"
BYTES = "bytes"
BYTES_PER_SECOND = "Bps"


@dataclass(frozen=True)
class Query:
    """`legend`: a series' name, with `{{label}}` for a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Limits:
    """Where a value stops to be fine. With `is_floor` what is below is bad, else what is above."""

    warning: float
    alarm: float
    is_floor: bool = False

    def steps(self) -> list[Threshold]:
        """From the lowest value up; the first holds from minus infinity on."""
        if self.is_floor:
            return [
                Threshold(None, "red"), Threshold(self.alarm, "orange"), Threshold(self.warning, "green"),
            ]  # fmt: skip
        return [Threshold(None, "green"), Threshold(self.warning, "orange"), Threshold(self.alarm, "red")]


NEUTRAL = [Threshold(None, "blue")]


def graph(
    title: str,
    unit: str,
    description: str,
    *queries: Query,
    limits: Limits | None = None,
    is_stacked: bool = False,
    highest: float | None = None,
    when_empty: str = "no data",
) -> timeseries.Panel:
    """`highest`: where the axis ends; None: by the data. `when_empty` stands in a panel of which there is nothing."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .no_value(when_empty)
        .span(GRAPH_WIDTH)
        .height(GRAPH_HEIGHT)
        .fill_opacity(30 if is_stacked else 8)
        .show_points(VisibilityMode.NEVER)
        .legend(
            VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .thresholds(_thresholds(limits))
    )
    if limits is not None:
        panel.thresholds_style(GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))
    if is_stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    if highest is not None:
        panel.max(highest)
    for number, query in enumerate(queries):
        panel.with_target(_target(query, number))
    return panel


def number(
    title: str,
    unit: str,
    description: str,
    expression: str,
    limits: Limits | None = None,
    when_empty: str = "no data",
) -> stat.Panel:
    """Of a query that has one series."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .no_value(when_empty)
        .span(NUMBER_WIDTH)
        .height(NUMBER_HEIGHT)
        .graph_mode(BigValueGraphMode.AREA)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .thresholds(_thresholds(limits))
        .with_target(_target(Query(expression, title), 0))
    )


def _thresholds(limits: Limits | None) -> ThresholdsConfig:
    steps = NEUTRAL if limits is None else limits.steps()
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _target(query: Query, number: int) -> Dataquery:
    return (
        Dataquery()
        .ref_id(chr(ord("A") + number))
        .datasource(SOURCE)
        .expr(query.expression)
        .legend_format(query.legend)
        .range()
    )
