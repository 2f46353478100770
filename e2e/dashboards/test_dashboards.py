"""Verdict by panels: each shows something of an installation under real load, and asks for series that were scraped."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.dashboards.frames import WINDOW, frames, queries_of
from e2e.dashboards.installation import running_installation
from e2e.dashboards.load import run_load
from tests.controlplane.processes import wait_until
from tests.dashboards.prometheus import Graphed, Prometheus, Range
from tests.dashboards.series import label_values
from tests.dashboards.shipped import PanelQuery, boards, panels, queries, variables

STEP_SECONDS = 3.0
LATE_SECONDS = 120.0
"""After the load: engines that were killed may still start."""
EMPTY = {
    "disaggregation: Prefills elsewhere that failed": "a prefill of this model takes milliseconds: hardly ever is its "
    "engine killed within one",
    **dict.fromkeys(
        ("autoscaler: Wake time, p50", "autoscaler: Wake time, p90"), "none of the services goes to zero in the time"
    ),
}
"""Panels without a failure to show, each with the reason."""
QUERIES = list(queries())
PANELS = [(name, panel) for name, board in boards().items() for panel in panels(board)]
CHOICES = [
    (name, variable["query"])
    for name, board in boards().items()
    for variable in variables(board)
    if variable["type"] == "query"
]

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Loaded:
    prometheus: Prometheus
    over: Range

    def graph(self, query: PanelQuery) -> list[Graphed]:
        """Without the series that have no value."""
        shown = f"{self.over.end - self.over.start:.0f}s"
        found = self.prometheus.graph(query.asked(WINDOW, shown), self.over)
        return [series for series in found if series.has_a_value]

    def is_full(self) -> bool:
        return all(self.graph(query) for query in QUERIES if title(query) not in EMPTY)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Loaded]:
    with running_installation(tmp_path_factory.mktemp("installation")) as installation:
        started = time.time()
        run_load(installation)
        over = Range(started, time.time(), STEP_SECONDS)
        if (path := pytestconfig.getoption("--dashboard-frames")) is not None:
            path.write_text(json.dumps(frames(installation.prometheus, over)))
        with suppress(TimeoutError):  # the tests say which panels are empty
            wait_until(lambda: until_now(installation.prometheus, started).is_full(), LATE_SECONDS, "all panels", 5.0)
        yield until_now(installation.prometheus, started)


def until_now(prometheus: Prometheus, started: float) -> Loaded:
    return Loaded(prometheus, Range(started, time.time(), STEP_SECONDS))


def title(query: PanelQuery) -> str:
    return f"{query.board}: {query.panel}"


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_has_an_answer(query: PanelQuery, loaded: Loaded) -> None:
    assert loaded.graph(query) or title(query) in EMPTY, query.asked(WINDOW)


def test_what_may_be_empty_is_a_panel() -> None:
    assert EMPTY.keys() <= {title(query) for query in QUERIES}


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_asks_for_series_that_were_scraped(query: PanelQuery, loaded: Loaded) -> None:
    asked = set(re.findall(r"\b(?:kvasir_|vllm:)\w+", query.expression))
    assert asked
    assert title(query) in EMPTY or asked <= set(loaded.prometheus.labels("__name__"))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_variable_has_something_to_choose(choice: tuple[str, str], loaded: Loaded) -> None:
    board, query = choice
    found = label_values(query)
    assert found is not None
    series, label = found
    assert loaded.prometheus.labels(label, PanelQuery(board, "", series, "").asked())


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel[0]}: {panel[1]['title']}")
def test_series_of_a_panel_have_names_of_their_own(panel: tuple[str, dict[str, Any]], loaded: Loaded) -> None:
    board, made = panel
    names = [legend(query, series) for query in queries_of(board, made) for series in loaded.graph(query)]
    assert all(name.strip() for name in names)
    assert len(names) == len(set(names))
    may_be_empty = f"{board}: {made['title']}" in EMPTY
    assert made["type"] != "stat" or len(names) == 1 or (may_be_empty and not names)


def legend(query: PanelQuery, series: Graphed) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: series.labels.get(name[1], ""), query.legend)
