"""What the dashboards' panels show of a time, for pictures of them (docs/dashboards/draw.py)."""

from math import isfinite
from typing import Any

from tests.dashboards.prometheus import Prometheus, Range
from tests.dashboards.shipped import PanelQuery, boards, panels

WINDOW = "30s"
"""Of rates: shorter than Grafana's, whose scrapes are farther apart."""


def frames(prometheus: Prometheus, over: Range) -> dict[str, Any]:
    """`boards`: by dashboard and number of a panel, of each of its queries the series, as labels and points."""
    shown = f"{over.end - over.start:.0f}s"
    answers = {
        name: {
            str(panel["id"]): [series_of(prometheus, query, shown, over) for query in queries_of(name, panel)]
            for panel in panels(board)
        }
        for name, board in boards().items()
    }
    return {"from": over.start, "to": over.end, "step": over.step, "boards": answers}


def queries_of(board: str, panel: dict[str, Any]) -> list[PanelQuery]:
    return [PanelQuery(board, panel["title"], each["expr"], each["legendFormat"]) for each in panel["targets"]]


def series_of(prometheus: Prometheus, query: PanelQuery, shown: str, over: Range) -> list[dict[str, Any]]:
    """JSON has no NaN: such points are null."""
    return [
        {
            "labels": dict(series.labels),
            "points": [(at, value if isfinite(value) else None) for at, value in series.points],
        }
        for series in prometheus.graph(query.asked(WINDOW, shown), over)
    ]
