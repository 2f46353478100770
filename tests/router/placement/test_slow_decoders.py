"""An engine whose steps take clearly longer than the fleet's costs what an answer takes longer there."""

from collections.abc import Mapping

import pytest
from tests.router.parts import a_request

from kvasir_router.endpoints.address import Address
from kvasir_router.placement.costs import ANSWER_WEIGHT
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint


def a_report(steps_per_second: float, num_prefilling_tokens: int = 0, num_ranks: int = 1) -> LoadReport:
    return LoadReport(
        num_running=1, num_waiting=0, waiting_uncached_tokens=0, running_uncached_tokens=num_prefilling_tokens,
        kv_used_tokens=0, kv_capacity_tokens=0, steps_per_second=steps_per_second, prefill_tokens_per_second=None,
        arrived=(), instance="one", data_parallel_size=num_ranks,
    )  # fmt: skip


class Fleet:
    def __init__(self, names: str = "abc") -> None:
        self.prefill = FleetPrefill()
        self.endpoints = [Endpoint(Address(name), EndpointLoad(512, self.prefill.new_member())) for name in names]

    def say(self, reports: Mapping[str, LoadReport], now: float = 0.0, times: int = 10) -> None:
        for endpoint in self.endpoints:
            if (report := reports.get(endpoint.url)) is not None:
                for _ in range(times):
                    endpoint.load.report(report, now)
        self.prefill.refresh(now)

    def costs(self, now: float = 0.0) -> dict[str, float]:
        by_url = FinishTime().costs(a_request(), self.endpoints, {}, now)
        return {url: terms["decode_load"] for url, terms in by_url.items()}


def test_an_answer_of_slow_steps_costs_what_they_take_longer() -> None:
    fleet = Fleet()
    fleet.say({"a": a_report(25.0), "b": a_report(100.0), "c": a_report(100.0)})
    longer = a_request().num_output_tokens * (1 / 25 - 1 / 100)
    assert fleet.costs() == {"a": pytest.approx(ANSWER_WEIGHT * longer), "b": 0.0, "c": 0.0}


@pytest.mark.parametrize(
    ("why", "report"),
    [
        ("what prompts in between explain", a_report(70.0)),
        ("steps of a prompt are none of an answer", a_report(5.0, num_prefilling_tokens=2000)),
        ("no step", a_report(0.0)),
        ("the ranks' sum", a_report(400.0, num_ranks=4)),
    ],
)
def test_an_engine_that_is_not_clearly_slower_costs_nothing(why: str, report: LoadReport) -> None:
    fleet = Fleet()
    fleet.say({"a": report, "b": a_report(100.0), "c": a_report(100.0)})
    assert set(fleet.costs().values()) == {0.0}, why


def test_an_engine_that_has_hardly_decoded_costs_nothing() -> None:
    """Its first report may come as its first prompt ends, and is of that prompt's steps alone; were it taken for slow,
    it would get no answer to show otherwise."""
    fleet = Fleet()
    fleet.say({"b": a_report(100.0), "c": a_report(100.0)})
    fleet.say({"a": a_report(8.0)}, times=3)
    assert set(fleet.costs().values()) == {0.0}
    fleet.say({"a": a_report(8.0)}, times=7)
    assert fleet.costs()["a"] > 0


def test_what_is_forgotten_counts_for_no_report() -> None:
    fleet = Fleet()
    fleet.say({"a": a_report(25.0), "b": a_report(100.0), "c": a_report(100.0)})
    fleet.say({"a": a_report(25.0)}, now=700.0, times=1)
    fleet.say({"b": a_report(100.0), "c": a_report(100.0)}, now=700.0)
    assert fleet.costs(700.0)["a"] == 0.0


def test_its_fastest_steps_count_until_they_are_long_ago() -> None:
    fleet = Fleet()
    for now, rate in ((0.0, 100.0), (1.0, 20.0), (500.0, 20.0), (900.0, 20.0)):
        fleet.say({"a": a_report(rate), "b": a_report(100.0), "c": a_report(100.0)}, now)
        assert (fleet.costs(now)["a"] > 0) == (now > 500), now


def test_an_engine_that_gets_nothing_is_tried_again() -> None:
    fleet = Fleet()
    fleet.say({"a": a_report(25.0), "b": a_report(100.0), "c": a_report(100.0)})
    fleet.say({"b": a_report(100.0), "c": a_report(100.0)}, now=700.0)
    assert fleet.costs(700.0)["a"] == 0.0
