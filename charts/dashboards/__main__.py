"""Writes every dashboard into the chart: `python -m charts.dashboards`, part of `make generate`; a test compares."""

from pathlib import Path

from charts.dashboards.board import dashboard_json
from charts.dashboards.boards import BOARDS

FOLDER = Path(__file__).parents[1] / "kvasir" / "files" / "dashboards"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stale in FOLDER.glob("*.json"):
        stale.unlink()
    for board in BOARDS:
        (FOLDER / f"{board.name}.json").write_text(dashboard_json(board))


if __name__ == "__main__":
    main()
