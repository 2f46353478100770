"""Data-parallel ranks of one engine as one endpoint: which are followed, and what their loads come to."""

import errno
from typing import Any, cast

import msgspec
import pytest
import zmq

from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_router.prefix_index.subscriber import EventListener, EventStatistics, Subscriber
from kvasir_router.service.engine_feed import EngineFeed
from kvasir_router.service.load_report import REPORT_LIFETIME_SECONDS, LoadReport

URL = "http://a"


class FakeSubscriber:
    def __init__(self, listener: EventListener) -> None:
        self.listener = listener
        self.is_open = False
        self.error: zmq.ZMQError | None = None
        self.statistics = EventStatistics(num_gaps=1)

    def start(self) -> None:
        self.is_open = True
        self.listener.reset(is_complete=self.error is None)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.is_open = False

    def resync(self) -> None:
        pass


class Engine:
    """What its ranks say, and what the router hears of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[tuple[int, FakeSubscriber]] = []
        self.heard: list[LoadReport] = []
        self.error: zmq.ZMQError | None = None
        self.index = PreciseIndex(BlockBudget(100))
        self.feed = EngineFeed(
            URL, self._subscribe, self.index, lambda _, report: self.heard.append(report), lambda: self.now
        )
        self.feed.follow(1)

    def _subscribe(self, rank: int, listener: EventListener) -> Subscriber:
        self.made.append((rank, FakeSubscriber(listener)))
        self.made[-1][1].error = self.error
        return cast(Subscriber, self.made[-1][1])

    @property
    def open_ranks(self) -> list[int]:
        return [rank for rank, subscriber in self.made if subscriber.is_open]

    def say(self, rank: int, num_ranks: int, **figures: Any) -> LoadReport:
        values = {
            "num_running": 0, "num_waiting": 0, "waiting_uncached_tokens": 0, "running_uncached_tokens": 0,
            "kv_used_tokens": 0, "kv_capacity_tokens": 100, "steps_per_second": 0.0,
            "prefill_tokens_per_second": None, "arrived": [], "instance": f"i{rank}",
        } | figures  # fmt: skip
        listener = next(subscriber.listener for each, subscriber in reversed(self.made) if each == rank)
        assert listener.report(msgspec.msgpack.encode([1, *values.values(), num_ranks])) == f"i{rank}"
        return self.heard[-1]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_as_many_ranks_are_followed_as_the_first_one_says(engine: Engine) -> None:
    assert engine.open_ranks == [0]
    engine.say(0, 3)
    assert engine.open_ranks == [0, 1, 2]
    engine.say(1, 3)
    engine.say(0, 3)
    assert len(engine.made) == 3
    engine.say(0, 1)  # another process, started with fewer
    assert (engine.open_ranks, engine.feed.num_ranks) == ([0], 1)


def test_it_is_known_what_an_engine_has_cached_when_all_its_ranks_have_told(engine: Engine) -> None:
    engine.say(0, 2)
    assert engine.index.is_complete(URL)
    (_, second) = engine.made[1]
    second.listener.lost()
    assert not engine.index.is_complete(URL)
    engine.say(0, 1)
    assert engine.index.is_complete(URL)
    engine.feed.follow(0)
    assert not engine.index.is_complete(URL)


def test_the_load_is_that_of_all_ranks(engine: Engine) -> None:
    engine.say(0, 2, num_running=1, waiting_uncached_tokens=10, steps_per_second=2.0, arrived=["a"])
    report = engine.say(
        1, 2, num_running=2, num_waiting=3, waiting_uncached_tokens=5, running_uncached_tokens=4, kv_used_tokens=50,
        steps_per_second=1.5, prefill_tokens_per_second=7.0, arrived=["b"],
    )  # fmt: skip
    assert report == LoadReport(3, 3, 15, 4, 50, 200, 3.5, 7.0, ("b",), "i1", 2)
    assert engine.say(0, 2) == LoadReport(2, 3, 5, 4, 50, 200, 1.5, 7.0, (), "i0", 2)


@pytest.mark.parametrize("work", [{"num_running": 2}, {"num_waiting": 2}])
def test_a_rank_that_works_and_has_fallen_silent_counts_no_more(engine: Engine, work: dict[str, int]) -> None:
    engine.say(0, 2)
    engine.say(1, 2, **work, kv_used_tokens=50)
    engine.now = REPORT_LIFETIME_SECONDS
    assert engine.say(0, 2).kv_used_tokens == 50
    engine.now += 0.01
    assert (engine.say(0, 2).kv_used_tokens, engine.heard[-1].kv_capacity_tokens) == (0, 100)


def test_the_load_of_ranks_that_are_gone_is_not_added(engine: Engine) -> None:
    engine.say(0, 2)
    engine.say(1, 2, kv_used_tokens=50)
    assert engine.say(0, 1).kv_used_tokens == 0


def test_what_ranks_said_is_forgotten_when_all_is_learned_anew(engine: Engine) -> None:
    engine.say(0, 2)
    engine.say(1, 2, kv_used_tokens=50)
    engine.feed.resync()
    assert engine.say(0, 2).kv_used_tokens == 0


def test_a_rank_for_which_there_is_no_socket_is_tried_again_and_the_load_is_told_anyway(engine: Engine) -> None:
    engine.error = zmq.ZMQError(errno.EMFILE)
    with pytest.raises(zmq.ZMQError):
        engine.say(0, 2, kv_used_tokens=7)
    assert (engine.open_ranks, engine.feed.num_ranks, engine.heard[-1].kv_used_tokens) == ([0], 1, 7)
    assert engine.index.is_complete(URL), "nothing is left of the other"
    engine.error = None
    engine.say(0, 2)
    assert engine.open_ranks == [0, 1]


def test_an_idle_rank_is_silent_and_counts(engine: Engine) -> None:
    engine.say(0, 2)
    engine.say(1, 2, kv_used_tokens=50)
    engine.now = 1000.0
    assert engine.say(0, 2).kv_used_tokens == 50


def test_what_a_rank_has_counted_stays_when_it_is_gone(engine: Engine) -> None:
    engine.say(0, 2)
    assert engine.feed.statistics().num_gaps == 2
    engine.say(0, 1)
    assert engine.feed.statistics().num_gaps == 2


def test_the_lag_is_that_of_the_rank_furthest_behind(engine: Engine) -> None:
    assert engine.feed.statistics().lag_seconds is None
    engine.say(0, 2)
    engine.made[0][1].statistics.lag_seconds = 0.2
    engine.made[1][1].statistics.lag_seconds = 0.5
    assert engine.feed.statistics().lag_seconds == 0.5
