"""No query of a panel is without an answer: a real Prometheus over the series that the programs' own code makes."""

from collections.abc import Iterator

import pytest
from tests.dashboards.prometheus import Prometheus, backfill, running_prometheus
from tests.dashboards.replay import OVER, scraped
from tests.dashboards.shipped import PanelQuery, queries


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(scraped(tmp_path_factory.mktemp("rows")), folder)
    with running_prometheus(folder) as prometheus:
        yield prometheus


@pytest.mark.parametrize("query", list(queries()), ids=str)
def test_a_query_has_an_answer(query: PanelQuery, replay: Prometheus) -> None:
    assert any(series.has_a_value for series in replay.graph(query.asked(), OVER)), query.asked()


def test_a_quantile_of_nothing_is_no_answer(replay: Prometheus) -> None:
    nothing = "histogram_quantile(0.9, sum by (le) (rate(kvasir_time_to_first_token_seconds_bucket[1m]) * 0))"
    assert replay.graph(nothing, OVER)
    assert not any(series.has_a_value for series in replay.graph(nothing, OVER))
