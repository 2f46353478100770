"""What a service's engines publish: a subscriber for each endpoint, events to the index, reports to the load."""

import asyncio
import time
from collections.abc import Callable, Set
from dataclasses import asdict
from typing import Any

from kvasir_router.config import KvEventPorts
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.event_statistics import EventStatistics
from kvasir_router.prefix_index.kv_events import EventBatch
from kvasir_router.prefix_index.precise import PreciseIndex
from kvasir_router.prefix_index.subscriber import DEFAULT_TIMING, Context, EventAddress, Subscriber, Timing
from kvasir_router.service.load_frame import MalformedReportError, decode_load
from kvasir_router.service.load_report import LoadReport

_EXPIRE_SECONDS = 1.0

OnReport = Callable[[str, LoadReport], None]
"""Told with the endpoint's url."""


class EventFeed:
    """Made on the running event loop. `clock` is the index's; `context` is closed by its owner, afterwards."""

    def __init__(
        self,
        ports: KvEventPorts,
        index: PreciseIndex,
        on_report: OnReport,
        context: Context,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        timing: Timing = DEFAULT_TIMING,
    ) -> None:
        self._ports = ports
        self._index = index
        self._on_report = on_report
        self._context = context
        self._clock = clock
        self._wall_clock = wall_clock
        self._timing = timing
        self._subscribers: dict[Address, Subscriber] = {}
        self._of_gone = EventStatistics()
        self._loop = asyncio.get_running_loop()
        self._expire_timer: asyncio.TimerHandle | None = None

    def follow(self, addresses: Set[Address]) -> None:
        for address in self._subscribers.keys() - addresses:
            self._stop(address)
        for address in addresses - self._subscribers.keys():
            self._start(address)
        if self._expire_timer is None and self._subscribers:
            self._expire_timer = self._loop.call_later(_EXPIRE_SECONDS, self._expire)

    def resync(self, url: str) -> None:
        """What was learned of the endpoint is void: learn it anew, if it is still followed."""
        if (subscriber := self._subscriber_of(url)) is not None:
            subscriber.resync()

    def close(self) -> None:
        if self._expire_timer is not None:
            self._expire_timer.cancel()
        self.follow(frozenset())

    def statistics(self) -> EventStatistics:
        """Of all endpoints since the start."""
        total = EventStatistics()
        for each in (self._of_gone, *(subscriber.statistics for subscriber in self._subscribers.values())):
            total.add(each)
        return total

    @property
    def num_held(self) -> int:
        """Blocks known to be cached, of all endpoints."""
        return self._index.num_held

    @property
    def num_orphans(self) -> int:
        return self._index.num_orphans

    @property
    def num_refused(self) -> int:
        return self._index.num_refused

    @property
    def max_lag_seconds(self) -> float:
        """Of the endpoint that is furthest behind."""
        lags = (subscriber.statistics.lag_seconds for subscriber in self._subscribers.values())
        return max((lag for lag in lags if lag is not None), default=0.0)

    def describe(self, url: str) -> dict[str, Any] | None:
        """For /endpoints, as plain JSON; None where the endpoint is not followed."""
        if (subscriber := self._subscriber_of(url)) is None:
            return None
        return {
            **asdict(subscriber.statistics),
            "num_events": dict(subscriber.statistics.num_events),  # asdict would count what is counted
            "is_complete": self._index.is_complete(url),
            "num_blocks": self._index.num_blocks(url),
        }

    def _start(self, address: Address) -> None:
        subscriber = self._subscribers[address] = Subscriber(
            self._context,
            EventAddress.beside(address.url, self._ports.events, self._ports.replay),
            _Listener(address.url, self._index, self._on_report, self._clock),
            self._wall_clock,
            self._timing,
        )
        subscriber.start()

    def _stop(self, address: Address) -> None:
        subscriber = self._subscribers.pop(address)
        subscriber.close()
        self._of_gone.add(subscriber.statistics)
        self._index.forget(address.url)

    def _subscriber_of(self, url: str) -> Subscriber | None:
        return next((each for address, each in self._subscribers.items() if address.url == url), None)

    def _expire(self) -> None:
        self._index.expire(self._clock())
        has_work = self._subscribers or self._index.num_held  # what is held of nobody any more is being freed
        self._expire_timer = self._loop.call_later(_EXPIRE_SECONDS, self._expire) if has_work else None


class _Listener:
    """One endpoint's part of the index and of the loads."""

    def __init__(self, url: str, index: PreciseIndex, on_report: OnReport, clock: Callable[[], float]) -> None:
        self._url = url
        self._index = index
        self._on_report = on_report
        self._clock = clock

    def reset(self, *, is_complete: bool) -> None:
        self._index.reset(self._url, self._clock(), is_complete=is_complete)

    def lost(self) -> None:
        self._index.doubt(self._url, self._clock())

    def apply(self, batch: EventBatch) -> None:
        now = self._clock()
        for event in batch.events:
            self._index.apply(self._url, event, now)

    def report(self, payload: bytes) -> str | None:
        try:
            report = decode_load(payload)
        except MalformedReportError:
            return None
        self._on_report(self._url, report)
        return report.instance
