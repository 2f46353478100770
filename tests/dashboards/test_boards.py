"""The shipped dashboards are what the code makes, ask for what programs export, and tell readers what to do."""

import re
from typing import Any

import pytest
from charts.dashboards.board import dashboard_json
from charts.dashboards.boards import BOARDS
from tests.dashboards.expressions import UnknownNameError, labels_of
from tests.dashboards.series import Labels, known_series, label_values
from tests.dashboards.shipped import FOLDER, PanelQuery, boards, panels, queries, variables

QUERIES = list(queries())
PANELS = [(name, panel) for name, board in boards().items() for panel in panels(board)]
CHOICES = [
    (name, variable) for name, board in boards().items() for variable in variables(board) if variable["type"] == "query"
]
UNITS = {"short", "reqps", "cps", "s", "percentunit", "bytes", "Bps", "si:tok", "si:tok/s"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def name_of(board_and_part: tuple[str, dict[str, Any]]) -> str:
    board, part = board_and_part
    return f"{board}: {part.get('title') or part['name']}"


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Labels]:
    return known_series(tmp_path_factory.mktemp("rows"))


def test_the_shipped_files_are_what_the_code_makes() -> None:
    made = {f"{board.name}.json": dashboard_json(board) for board in BOARDS}
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == made, "run `make generate`"


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_asks_for_series_and_labels_that_are_there(query: PanelQuery, series: dict[str, Labels]) -> None:
    answered = labels_of(query.asked(), series)
    assert set(re.findall(r"{{(\w+)}}", query.legend)) <= answered
    assert query.legend


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_query_names_variables_of_its_dashboard(query: PanelQuery) -> None:
    chosen = {variable["name"] for variable in variables(boards()[query.board])}
    assert query.variables
    assert query.variables <= chosen


@pytest.mark.parametrize("choice", CHOICES, ids=name_of)
def test_a_variable_lists_a_label_of_series_that_are_there(
    choice: tuple[str, dict[str, Any]], series: dict[str, Labels]
) -> None:
    board, variable = choice
    asked = label_values(variable["query"])
    assert asked is not None
    query = PanelQuery(board, "", asked[0], "")
    assert asked[1] in labels_of(query.asked(), series)
    names = [each["name"] for each in variables(boards()[board])]
    assert query.variables <= set(names[: names.index(variable["name"])])
    assert (variable["includeAll"], variable["allValue"], variable["multi"]) == (True, ".*", True)


@pytest.mark.parametrize("panel", PANELS, ids=name_of)
def test_a_panel_says_what_it_shows_in_which_unit_and_from_where(panel: tuple[str, dict[str, Any]]) -> None:
    _, made = panel
    defaults = made["fieldConfig"]["defaults"]
    assert made["description"].endswith((".", ".)"))
    assert len(made["description"]) > 20
    assert defaults["unit"] in UNITS
    assert defaults["noValue"]
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert made["datasource"] == SOURCE
    assert all(target["datasource"] == SOURCE for target in made["targets"])


@pytest.mark.parametrize("name", boards())
def test_a_dashboard_can_be_linked_to(name: str) -> None:
    board = boards()[name]
    assert board["uid"] == f"kvasir-{name}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    [link] = board["links"]
    assert (link["tags"], link["includeVars"]) == (board["tags"], True)


def test_a_variable_means_the_same_in_every_dashboard() -> None:
    """Because links carry it from one to the other."""
    texts: dict[str, set[str]] = {}
    for _, variable in CHOICES:
        texts.setdefault(variable["name"], set()).add(variable["label"])
    assert all(len(found) == 1 for found in texts.values())


@pytest.mark.parametrize(
    "expression",
    [
        "kvasir_num_requests_runing",
        'kvasir_num_requests_running{services="a"}',
        "sum by (pods) (kvasir_num_requests_running)",
        "sum by (pod) (kvasir_num_requests_running) / sum by (role) (kvasir_num_requests_running)",
        "histogram_quantile(0.9, sum(rate(kvasir_time_to_first_token_seconds_bucket[1m])))",
        "rate(kvasir_router_picks_total[1m]) * on (exported_endpoints) kvasir_router_in_flight",
        'kvasir_operator_leader{inference_service="a"}',
        'label_replace(kvasir_operator_leader, "pod", "none", "pods", "")',
    ],
)
def test_what_is_not_there_is_found(expression: str, series: dict[str, Labels]) -> None:
    with pytest.raises(UnknownNameError):
        labels_of(expression, series)
