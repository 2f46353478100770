"""The dashboards as the chart ships them, and their queries as Grafana would ask them with everything chosen."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "charts" / "kvasir" / "files" / "dashboards"
_VARIABLE = re.compile(r"\$(?!__)\{?(\w+)\}?")


@dataclass(frozen=True)
class PanelQuery:
    """One target of one panel."""

    board: str
    panel: str
    expression: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel} ({self.legend})"

    def asked(self, window: str = "1m", time_shown: str = "5m") -> str:
        """With `All` chosen in every variable."""
        windows = self.expression.replace("$__rate_interval", window).replace("$__range", time_shown)
        return _VARIABLE.sub(".*", windows)

    @property
    def variables(self) -> set[str]:
        return set(_VARIABLE.findall(self.expression))


@cache
def boards() -> dict[str, dict[str, Any]]:
    """By name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the titles of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board["templating"]["list"]
    return found


def queries() -> Iterator[PanelQuery]:
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield PanelQuery(name, panel["title"], target["expr"], target["legendFormat"])
