"""A dashboard: a title, what can be chosen, and rows of panels; and the JSON that Grafana reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from charts.dashboards.variables import Choice, source_variable, variable
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType, Panel

TAG = "kvasir"
_SCHEMA_VERSION = 39


@dataclass(frozen=True)
class Section:
    """A row of panels under a title."""

    title: str
    panels: Sequence[Builder[Panel]]


@dataclass(frozen=True)
class Board:
    """`name`: of its file and in its address."""

    name: str
    title: str
    description: str
    choices: Sequence[Choice]
    sections: Sequence[Section]


def dashboard_json(board: Board) -> str:
    made = _dashboard(board).build()
    made.schema_version = _SCHEMA_VERSION
    for number, panel in enumerate(made.panels or [], start=1):
        panel.id_val = number  # addresses of single panels hold it
    return JSONEncoder(sort_keys=True, indent=2).encode(made) + "\n"


def _dashboard(board: Board) -> Dashboard:
    dashboard = (
        Dashboard(f"Kvasir / {board.title}")
        .uid(f"kvasir-{board.name}")
        .description(board.description)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_others())
        .variables([source_variable(), *map(variable, board.choices)])
    )
    for section in board.sections:
        dashboard.with_row(Row(section.title))
        for panel in section.panels:
            dashboard.with_panel(panel)
    return dashboard


def _others() -> DashboardLink:
    """To the other dashboards, with what is chosen here."""
    return (
        DashboardLink("Kvasir")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
