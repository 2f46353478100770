"""Draws dashboards with Grafana's own components in a browser, from recorded answers to their queries.

pytest e2e/dashboards --dashboard-frames FRAMES.json       (records)
python -m docs.dashboards.draw FRAMES.json [NAME ...]      (writes docs/dashboards/NAME.png; all without a NAME)

Needs what `npm ci` in docs/dashboards installs, and Debian's chromium.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from tests.dashboards.shipped import boards

HERE = Path(__file__).parent
PAGE = HERE / "build" / "index.html"
WIDTH = 1440
PATIENCE_MILLISECONDS = 300_000.0  # a bound for a crowded machine; a quiet one takes under 2 s


def main(frames: Path, *names: str) -> None:
    recorded = json.loads(frames.read_text())
    subprocess.run(["node", HERE / "bundle.js"], check=True, cwd=HERE)
    PAGE.write_text('<link rel="stylesheet" href="page.css"><div id="board"></div><script src="page.js"></script>')
    chromium = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names or boards():
            draw(browser, name, recorded)
        browser.close()


def draw(browser: Browser, name: str, recorded: dict[str, Any]) -> None:
    page, errors = browser.new_page(viewport={"width": WIDTH, "height": 800}), []
    page.set_default_timeout(PATIENCE_MILLISECONDS)
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(PAGE.as_uri())
    own = {**recorded, "answers": recorded["boards"][name]}
    page.evaluate("([board, recorded]) => draw(board, recorded)", [boards()[name], own])
    if errors:
        sys.exit(f"the page of {name} failed: {errors[0]}")
    page.screenshot(path=HERE / f"{name}.png", full_page=True)
    page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
