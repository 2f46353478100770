"""The autoscaler asks for series that engines, routers and the operator have, in expressions that hold."""

import itertools
import re
from pathlib import Path

import promql_parser
import pytest
from tests.contract.exported_series import exported_names
from tests.dashboards.prometheus import Graphed, Range, backfill, running_prometheus

from kvasir_operator.autoscaling.queries import Queries

QUERIES = Queries()
OWN_LABELS: tuple[dict[str, str], ...] = ({"finish_reason": "stop"}, {"le": "1"}, {"le": "+Inf"})
ALL = [
    query
    for queries in (QUERIES, Queries(["models", "other"]))
    for query in (
        *queries.by_pod().values(),
        *queries.of_role().values(),
        *queries.held().values(),
        queries.former_days(120),
    )
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
    of_service = {"inference_service": "llama", "service": "models/llama", "service_namespace": "models"}
    labels = {"__name__": name, "namespace": "models", **of_service, **own}
    points = [(at, 100.0 + per_second * at) for at in range(0, 181, 15)]
    return [Graphed({**labels, "job": job, "pod": pod}, points) for job in ("a", "b") for pod in ("p-0", "p-1")]


def test_a_pod_that_two_jobs_scrape_counts_once(tmp_path: Path) -> None:
    names = sorted({name for query in ALL for name in re.findall(r"kvasir_\w+", query)})
    everything = [
        series
        for role, name, own in itertools.product(("serve", "router"), names, OWN_LABELS)
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


def test_a_queue_is_found_by_the_services_name_wherever_its_gateway_is() -> None:
    assert QUERIES.held()["num_held"].endswith("(kvasir_router_queued_requests))")
    assert '{service=~"(models|other)/.+"}' in Queries(["other", "models"]).held()["num_held"]


def test_a_pod_that_is_no_longer_scraped_gives_no_latency(tmp_path: Path) -> None:
    """Prometheus ends a gauge with its target; what a counter grew by in the window is known for longer."""

    def graphed(pod: str, name: str, per_second: float, **own: str) -> Graphed:
        labels = {"__name__": name, "namespace": "models", "inference_service": "llama", "role": "serve", "pod": pod}
        return Graphed({**labels, **own}, [(at, 1.0 + per_second * at) for at in range(0, 181, 15)])

    buckets = [
        graphed(pod, "kvasir_time_to_first_token_seconds_bucket", float(float(le) >= slowest), le=le)
        for pod, slowest in (("there", 1), ("gone", 5))
        for le in ("1", "4", "+Inf")
    ]
    backfill([*buckets, graphed("there", "kvasir_kv_cache_capacity_tokens", 0.0)], tmp_path)
    with running_prometheus(tmp_path) as prometheus:
        [p90] = prometheus.graph(QUERIES.of_role()["time_to_first_token_p90"], Range(150, 180, 15))
    assert max(number for _, number in p90.points) <= 1


def test_what_is_over_the_long_window_says_so() -> None:
    for text in QUERIES.of_role().values():
        short, long = text.split(" or on (namespace, inference_service, role) ")
        assert "[1m]" in short
        assert "[2m]" not in short
        assert long == f'label_replace({short.replace("[1m]", "[2m]")}, "window", "2m", "", "")'


def test_former_days_are_asked_for_at_the_time_that_comes() -> None:
    assert 'offset 86280s), "day", "1", "", "")' in QUERIES.former_days(120)
