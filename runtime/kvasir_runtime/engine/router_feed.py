"""What the engine core publishes for routers as it goes: what its prefix cache gained and lost, and its load.

The loop calls it once a turn, after clients have got their tokens. It never waits: nobody may be listening, or slowly.
"""

import time
from collections.abc import Callable

from kvasir_runtime.engine.event_publisher import EventPublisher
from kvasir_runtime.engine.load_report import LoadReporter
from kvasir_runtime.kv_cache.events import KvEventLog
from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.requests.stats import SchedulerStats


class RouterFeed:
    def __init__(
        self,
        event_log: KvEventLog,
        publisher: EventPublisher,
        reporter: LoadReporter | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reporter` None: load is not reported."""
        self.event_log = event_log
        self._publisher = publisher
        self._reporter = reporter
        self._clock = clock
        self.num_kv_events = 0
        """Published so far."""

    def arrive(self, message: AddRequest) -> None:
        if self._reporter is not None and message.http_request_id is not None:
            self._reporter.arrive(message.http_request_id)

    def publish(self, stats: SchedulerStats) -> None:
        """All that a turn brought; of the load what is due."""
        if events := self.event_log.take():
            self._publisher.publish_events(events)
            self.num_kv_events += len(events)
        if self._reporter is not None and (report := self._reporter.due(stats, self._clock())) is not None:
            self._publisher.publish_load(report)

    def wait_seconds(self) -> float | None:
        """Until `publish` should be called again although nothing happens; None: not before something does."""
        return None if self._reporter is None else self._reporter.wait_seconds(self._clock())
