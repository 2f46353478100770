"""The autoscaler asks for series that engines, routers and the operator have, in expressions that hold."""

import itertools
import re
from pathlib import Path

import promql_parser
import pytest
from tests.contract.exported_series import exported_names
from tests.dashboards.prometheus import Graphed, Range, backfill, running_prometheus

from kvasir_operator.autoscaling.queries import RoleQueries
from kvasir_operator.kube.kinds import ServiceKey

QUERIES = RoleQueries(ServiceKey("models", 'a"b'), "serve")
ALL = [
    *QUERIES.by_pod().values(),
    *QUERIES.of_role(["engine-0", "engine.1"]).values(),
    *QUERIES.held(is_behind_gateway=False).values(),
    *QUERIES.held(is_behind_gateway=True).values(),
    *QUERIES.former_days(120),
]


@pytest.fixture(scope="module")
def known() -> set[str]:
    return exported_names()


@pytest.mark.parametrize("query", ALL)
def test_a_query_holds_and_asks_for_what_is_there(query: str, known: set[str]) -> None:
    promql_parser.parse(query)
    asked = set(re.findall(r"kvasir_\w+", query))
    assert asked
    assert asked <= known


def twice(name: str, own: dict[str, str], per_second: float) -> list[Graphed]:
    """The same series of one pod, as two jobs scraped it."""
    labels = {"__name__": name, "namespace": "models", "inference_service": 'a"b', "service": 'models/a"b', **own}
    points = [(at, 100.0 + per_second * at) for at in range(0, 181, 15)]
    return [Graphed({**labels, "job": job, "pod": pod}, points) for job in ("a", "b") for pod in ("p-0", "p-1")]


def test_a_pod_that_two_jobs_scrape_counts_once(tmp_path: Path) -> None:
    names = sorted({name for query in ALL for name in re.findall(r"kvasir_\w+", query)})
    everything = [
        series
        for role, name, own in itertools.product(("serve", "router"), names, ({"finish_reason": "stop"}, {"le": "1"}))
        for series in twice(name, {"role": role, "tenant": "t", **own}, per_second=2.0)
    ]
    answers = []
    for number, jobs in enumerate((("a",), ("a", "b"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        backfill([each for each in everything if each.labels["job"] in jobs], folder)
        with running_prometheus(folder) as prometheus:
            answers.append([prometheus.graph(query, Range(120, 180, 15)) for query in ALL])
    assert any(answers[0])
    assert answers[0] == answers[1]


def test_a_gateways_queue_is_found_by_the_services_name() -> None:
    assert 'service="models/a\\"b"' in QUERIES.held(is_behind_gateway=True)["num_held"]
    assert 'role="router"' in QUERIES.held(is_behind_gateway=False)["num_held"]


def test_latencies_are_those_of_the_pods_that_there_are() -> None:
    of_role = QUERIES.of_role(["engine-1", "engine.0"])
    latencies = [text for name, text in of_role.items() if name.endswith("_p90")]
    assert [text.count('pod=~"engine-1|engine\\\\.0"') for text in latencies] == [2, 2]


def test_what_is_over_the_long_window_says_so() -> None:
    for text in QUERIES.of_role(["engine-0"]).values():
        short, long = text.split(" or on() ")
        assert "[1m]" in short
        assert "[2m]" not in short
        assert long == f'label_replace({short.replace("[1m]", "[2m]")}, "window", "2m", "", "")'


def test_former_days_are_asked_for_at_the_time_that_comes() -> None:
    assert QUERIES.former_days(120)[0].endswith("offset 86280s)")
