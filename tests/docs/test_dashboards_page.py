"""docs/dashboards.md shows every dashboard of the chart, and what draws them is locked without an address."""

import json
import re
from pathlib import Path

from charts.dashboards.boards import BOARDS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "dashboards.md").read_text()


def test_every_dashboard_has_its_picture_under_its_title() -> None:
    shown = re.findall(r"^## (.+)\n\n!\[\1\]\(dashboards/(.+)\.png\)$", PAGE, re.MULTILINE)
    assert shown == [(board.title, board.name) for board in BOARDS]
    assert all((DOCS / "dashboards" / f"{name}.png").exists() for _, name in shown)


def test_the_lock_holds_what_the_package_asks_for_by_hash_and_not_by_address() -> None:
    folder = DOCS / "dashboards"
    asked = json.loads((folder / "package.json").read_text())["dependencies"]
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert locked.pop("")["dependencies"] == asked
    assert all("integrity" in package and "resolved" not in package for package in locked.values())
