"""What one engine publishes: each of its data-parallel ranks has a cache and a load, and sockets of its own for them.

Rank r is on the ports that are r higher. How many there are is said in rank 0's load reports, so an engine that reports
no load is followed by its rank 0 alone. To the router the ranks are one endpoint: their loads are added up.
"""

from collections.abc import Callable, Sequence

import zmq

from kvasir_router.prefix_index.kv_events import EventBatch
from kvasir_router.prefix_index.precise import PreciseIndex
from kvasir_router.prefix_index.subscriber import EventListener, EventStatistics, Subscriber
from kvasir_router.service.load_report import LoadReport, MalformedReportError, decode_load, of_all_ranks

OnReport = Callable[[str, LoadReport], None]
"""Told with the endpoint's url."""
Subscribe = Callable[[int, EventListener], Subscriber]
"""To a rank; not started."""


class EngineFeed:
    """`clock` is the index's."""

    def __init__(
        self, url: str, subscribe: Subscribe, index: PreciseIndex, on_report: OnReport, clock: Callable[[], float]
    ) -> None:
        self.url = url
        self._subscribe = subscribe
        self._index = index
        self._on_report = on_report
        self._clock = clock
        self._subscribers: list[Subscriber] = []  # by rank
        self._of_gone = EventStatistics()
        self._reports: dict[int, tuple[LoadReport, float]] = {}  # by rank: the last, and when it came

    @property
    def num_ranks(self) -> int:
        """That are followed."""
        return len(self._subscribers)

    def follow(self, num_ranks: int) -> None:
        while len(self._subscribers) > num_ranks:
            self._stop_last()
        for rank in range(len(self._subscribers), num_ranks):
            subscriber = self._subscribe(rank, _RankListener(self, self._index, rank, self._clock))
            try:
                subscriber.start()
            except zmq.ZMQError:
                subscriber.close()
                self._index.forget(self.url, rank)
                raise  # the next report of rank 0 tries again
            self._subscribers.append(subscriber)

    def resync(self) -> None:
        self._reports.clear()
        for subscriber in self._subscribers:
            subscriber.resync()

    def statistics(self) -> EventStatistics:
        """Of all ranks; the lag is that of the one furthest behind."""
        live = [subscriber.statistics for subscriber in self._subscribers]
        total = EventStatistics(lag_seconds=max_lag_seconds(live))
        for each in (self._of_gone, *live):
            total.add(each)
        return total

    def report(self, rank: int, report: LoadReport) -> None:
        now = self._clock()
        self._reports[rank] = (report, now)
        others = [
            last
            for other, (last, at) in self._reports.items()
            if other != rank and other < report.data_parallel_size and last.holds(now - at)
        ]
        self._on_report(self.url, of_all_ranks(report, others))
        if rank == 0:
            self.follow(report.data_parallel_size)

    def _stop_last(self) -> None:
        subscriber = self._subscribers.pop()
        rank = len(self._subscribers)
        subscriber.close()
        self._of_gone.add(subscriber.statistics)
        self._reports.pop(rank, None)
        self._index.forget(self.url, rank)


def max_lag_seconds(statistics: Sequence[EventStatistics]) -> float | None:
    return max((each.lag_seconds for each in statistics if each.lag_seconds is not None), default=None)


class _RankListener:
    """One rank's part of the index and of the load."""

    def __init__(self, engine: EngineFeed, index: PreciseIndex, rank: int, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._index = index
        self._rank = rank
        self._clock = clock

    def reset(self, *, is_complete: bool) -> None:
        self._index.reset(self._engine.url, is_complete=is_complete, rank=self._rank)

    def lost(self) -> None:
        self._index.doubt(self._engine.url, self._clock(), self._rank)

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            self._index.apply(self._engine.url, event, self._rank)

    def report(self, payload: bytes) -> str | None:
        try:
            report = decode_load(payload)
        except MalformedReportError:
            return None
        self._engine.report(self._rank, report)
        return report.instance
