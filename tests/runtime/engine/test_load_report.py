"""When a load report is due, and what it says."""

from unittest.mock import Mock

import msgspec
import pytest

from kvasir_runtime.config import (
    CacheConfig,
    KvConnectorConfig,
    KvEventsConfig,
    KvTransferConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
)
from kvasir_runtime.engine.core_main import router_feed
from kvasir_runtime.engine.load_report import REPEAT_SECONDS, LoadReport, LoadReporter
from kvasir_runtime.kv_cache.spec import KvGroup
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.commands import Place

HZ = 20
INTERVAL = 1 / HZ


def stats(**figures) -> SchedulerStats:
    base = SchedulerStats(
        num_running=0, num_waiting=0, num_blocks_used=0, num_blocks=8, num_steps=0, num_preemptions=0,
        num_prefix_queries=0, num_prefix_hits=0, last_step_time=0.0, kv_capacity_tokens=128,
    )  # fmt: skip
    return msgspec.structs.replace(base, **figures)


IDLE = stats()


@pytest.fixture
def reporter() -> LoadReporter:
    """That has told of an idle engine at second 0."""
    reporter = LoadReporter(HZ, "cafe")
    assert reporter.due(IDLE, 0.0) is not None
    return reporter


def test_a_report_holds_the_scheduler_s_figures_the_arrivals_and_the_instance():
    reporter = LoadReporter(HZ, "cafe")
    reporter.arrive("a")
    reporter.arrive("b")
    figures = {
        "num_running": 1, "num_waiting": 2, "waiting_uncached_tokens": 3, "running_uncached_tokens": 4,
        "kv_used_tokens": 5, "kv_capacity_tokens": 6, "steps_per_second": 7.5, "prefill_tokens_per_second": 8.5,
    }  # fmt: skip
    assert reporter.due(stats(**figures), 0.0) == LoadReport(**figures, arrived=["a", "b"], instance="cafe")


@pytest.mark.parametrize("size", [1, 3])
def test_a_report_says_how_many_cores_report_for_themselves(size):
    config = RuntimeConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(kv_events_config=KvEventsConfig(enable_kv_cache_events=True, load_hz=HZ)),
        parallel=ParallelConfig(data_parallel_size=size),
    )
    rank, publisher = Mock(), Mock()
    rank.layout.groups = (KvGroup((0,)),)
    router_feed(config, rank, publisher, "cafe").publish(IDLE)
    [report] = publisher.publish_load.call_args.args
    assert report.data_parallel_size == size


@pytest.mark.parametrize(
    ("role", "port"), [("kv_both", 5600), ("kv_producer", None), ("kv_consumer", None), (None, None)]
)
def test_a_report_says_where_cached_prefixes_are_exchanged(role, port):
    transfer = None if role is None else KvTransferConfig(kv_connector="NixlConnector", kv_role=role)
    events = KvEventsConfig(enable_kv_cache_events=True, load_hz=HZ)
    config = RuntimeConfig(
        model=ModelConfig(model="m"), cache=CacheConfig(kv_events_config=events, kv_transfer_config=transfer)
    )
    agent = None if transfer is None else Mock(place=Place(engine_id="e", host="10.0.0.7", port=5600))
    assert first_report(config, agent).kv_transfer_port == port


@pytest.mark.parametrize(("configured", "own", "told"), [(5600, 5600, 5600), (5600, 5603, 5600), (0, 41234, 41234)])
def test_a_report_names_the_port_of_the_first_rank(configured, own, told):
    extra = KvConnectorConfig(side_channel_port=configured)
    transfer = KvTransferConfig(kv_connector="NixlConnector", kv_connector_extra_config=extra)
    events = KvEventsConfig(enable_kv_cache_events=True, load_hz=HZ)
    config = RuntimeConfig(
        model=ModelConfig(model="m"), cache=CacheConfig(kv_events_config=events, kv_transfer_config=transfer)
    )
    agent = Mock(place=Place(engine_id="e", host="10.0.0.7", port=own))
    assert first_report(config, agent).kv_transfer_port == told


def first_report(config, agent):
    rank, publisher = Mock(), Mock()
    rank.layout.groups = (KvGroup((0,)),)
    router_feed(config, rank, publisher, "cafe", agent).publish(IDLE)
    [report] = publisher.publish_load.call_args.args
    return report


@pytest.mark.parametrize(
    "change",
    [
        {"num_running": 1}, {"num_waiting": 1}, {"waiting_uncached_tokens": 1}, {"running_uncached_tokens": 1},
        {"kv_used_tokens": 1}, {"kv_capacity_tokens": 1},
    ],
)  # fmt: skip
def test_what_changes_is_told(reporter, change):
    assert reporter.due(stats(**change), 1.0) is not None


def test_an_idle_engine_tells_nothing_however_long(reporter):
    assert reporter.due(IDLE, 3600.0) is None
    assert reporter.wait_seconds(3600.0) is None


@pytest.mark.parametrize("told", [{"data_parallel_size": 2}, {"kv_transfer_port": 5600}])
def test_an_idle_core_of_several_or_that_exchanges_kv_tells_it_again_for_routers_that_have_come_since(told):
    reporter = LoadReporter(HZ, "cafe", **told)
    first = reporter.due(IDLE, 1.0)
    assert reporter.due(IDLE, 2.0) is None
    assert reporter.wait_seconds(2.0) == REPEAT_SECONDS - 1
    assert reporter.due(IDLE, 0.9 + REPEAT_SECONDS) is None
    assert reporter.due(IDLE, 1.0 + REPEAT_SECONDS) == first
    assert reporter.due(stats(num_running=1), 2.0 + REPEAT_SECONDS) is not None
    reporter.arrive("a")
    assert reporter.due(IDLE, 2.0 + REPEAT_SECONDS) is None
    assert reporter.wait_seconds(2.0 + REPEAT_SECONDS) == pytest.approx(INTERVAL)


def test_rates_alone_are_no_news(reporter):
    assert reporter.due(stats(steps_per_second=9.0, prefill_tokens_per_second=9.0), 1.0) is None


def test_an_arrival_is_news_although_nothing_else_changed_and_is_told_once(reporter):
    reporter.arrive("a")
    report = reporter.due(IDLE, 1.0)
    assert report is not None
    assert report.arrived == ["a"]
    assert reporter.due(IDLE, 2.0) is None
    busy = reporter.due(stats(num_running=1), 3.0)
    assert busy is not None
    assert busy.arrived == []


def test_a_working_engine_reports_once_a_second_though_nothing_changes(reporter):
    busy = stats(num_running=1)
    reports = [reporter.due(busy, 1.0 + second / 10) for second in range(31)]
    assert [index for index, report in enumerate(reports) if report is not None] == [0, 10, 20, 30]


def test_a_burst_of_changes_is_told_no_more_often_than_asked_for(reporter):
    times = [1.0 + step / 1000 for step in range(1000)]
    reports = [reporter.due(stats(kv_used_tokens=index + 1), now) for index, now in enumerate(times)]
    assert sum(report is not None for report in reports) == pytest.approx(HZ, abs=1)


def test_what_was_held_back_is_told_when_its_time_has_come(reporter):
    reporter.arrive("a")
    assert reporter.due(IDLE, 0.4 * INTERVAL) is None
    assert reporter.wait_seconds(0.4 * INTERVAL) == pytest.approx(0.6 * INTERVAL)
    assert reporter.wait_seconds(2 * INTERVAL) == 0.0
    report = reporter.due(IDLE, INTERVAL)
    assert report is not None
    assert report.arrived == ["a"]
    assert reporter.wait_seconds(INTERVAL) is None
