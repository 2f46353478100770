"""What a service's engines publish, one `EngineFeed` an endpoint: events to the index, reports to the load."""

import asyncio
import time
from collections.abc import Callable, Set
from dataclasses import asdict
from functools import partial
from typing import Any

from kvasir_router.config import KvEventPorts
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.precise import PreciseIndex
from kvasir_router.prefix_index.subscriber import (
    DEFAULT_TIMING,
    Context,
    EventAddress,
    EventListener,
    EventStatistics,
    Subscriber,
    Timing,
)
from kvasir_router.service.engine_feed import EngineFeed, OnReport, max_lag_seconds

_EXPIRE_SECONDS = 1.0


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
        self.index = index
        self._on_report = on_report
        self._context = context
        self._clock = clock
        self._wall_clock = wall_clock
        self._timing = timing
        self._engines: dict[Address, EngineFeed] = {}
        self._of_gone = EventStatistics()
        self._loop = asyncio.get_running_loop()
        self._expire_timer: asyncio.TimerHandle | None = None

    def follow(self, addresses: Set[Address]) -> None:
        for address in self._engines.keys() - addresses:
            self._stop(address)
        for address in addresses - self._engines.keys():
            self._start(address)
        if self._expire_timer is None and self._engines:
            self._expire_timer = self._loop.call_later(_EXPIRE_SECONDS, self._expire)

    def resync(self, url: str) -> None:
        """What was learned of the endpoint is void: learn it anew, if it is still followed."""
        if (engine := self._engine_of(url)) is not None:
            engine.resync()

    def close(self) -> None:
        if self._expire_timer is not None:
            self._expire_timer.cancel()
        self.follow(frozenset())

    def statistics(self) -> EventStatistics:
        """Of all endpoints since the start."""
        total = EventStatistics()
        for each in (self._of_gone, *(engine.statistics() for engine in self._engines.values())):
            total.add(each)
        return total

    @property
    def max_lag_seconds(self) -> float:
        """Of the endpoint that is furthest behind."""
        return max_lag_seconds([engine.statistics() for engine in self._engines.values()]) or 0.0

    def describe(self, url: str) -> dict[str, Any] | None:
        """For /endpoints, as plain JSON; None where the endpoint is not followed."""
        if (engine := self._engine_of(url)) is None:
            return None
        statistics = engine.statistics()
        return {
            **asdict(statistics),
            "num_events": dict(statistics.num_events),  # asdict would count what is counted
            "num_ranks": engine.num_ranks,
            "is_complete": self.index.is_complete(url),
            "num_blocks": self.index.num_blocks(url),
        }

    def _start(self, address: Address) -> None:
        subscribe = partial(self._subscriber, address.url)
        engine = EngineFeed(address.url, subscribe, self.index, self._on_report, self._clock)
        self._engines[address] = engine
        engine.follow(1)

    def _subscriber(self, url: str, rank: int, listener: EventListener) -> Subscriber:
        address = EventAddress.beside(url, self._ports.events + rank, self._ports.replay + rank)
        return Subscriber(self._context, address, listener, self._wall_clock, self._timing)

    def _stop(self, address: Address) -> None:
        engine = self._engines.pop(address)
        engine.follow(0)
        self._of_gone.add(engine.statistics())

    def _engine_of(self, url: str) -> EngineFeed | None:
        return next((engine for address, engine in self._engines.items() if address.url == url), None)

    def _expire(self) -> None:
        self.index.expire(self._clock())
        has_work = self._engines or self.index.num_held  # what is held of nobody any more is being freed
        self._expire_timer = self._loop.call_later(_EXPIRE_SECONDS, self._expire) if has_work else None
