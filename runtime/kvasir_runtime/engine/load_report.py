"""What routers are told of an engine's load, and when: soon after it changes, never more often than they asked for.

Between two reports a router adds what it has sent here itself, so a report names the requests that have arrived since
the last one: exactly those the router no longer adds.
"""

import msgspec

from kvasir_runtime.requests.stats import SchedulerStats

VERSION = 1
BUSY_SECONDS = 1.0
"""An engine that works reports so often, whether anything a router reads has changed or not."""
REPEAT_SECONDS = 10.0
"""The same of an idle one of several cores, or one that exchanges KV: that is heard only in reports."""


class LoadReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One message under the topic `kvasir-load`: an array in this order."""

    version: int = VERSION
    num_running: int
    num_waiting: int
    waiting_uncached_tokens: int
    running_uncached_tokens: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    steps_per_second: float
    prefill_tokens_per_second: float | None
    arrived: list[str]
    """`x-request-id` of the requests that came since the last report."""
    instance: str
    """Of the engine core; another one has cached nothing of this one's."""
    data_parallel_size: int = 1
    """Engine cores there are: each reports for itself, rank r on the ports that are r higher."""
    kv_transfer_port: int | None = None
    """Of rank 0's side channel, that of rank r being r higher, where the engine gives others what it has cached as it
    fetches from them; None: it does not."""


class LoadReporter:
    """Decides what is due. Times are seconds of one monotonic clock."""

    def __init__(
        self, load_hz: float, instance: str, data_parallel_size: int = 1, kv_transfer_port: int | None = None
    ) -> None:
        self._interval = 1 / load_hz
        self._instance = instance
        self._data_parallel_size = data_parallel_size
        self._kv_transfer_port = kv_transfer_port
        is_repeated = data_parallel_size > 1 or kv_transfer_port is not None
        self._repeat_seconds = REPEAT_SECONDS if is_repeated else float("inf")
        self._arrived: list[str] = []
        self._last: LoadReport | None = None
        self._last_time = float("-inf")
        self._is_held_back = False

    def arrive(self, http_request_id: str) -> None:
        self._arrived.append(http_request_id)

    def due(self, stats: SchedulerStats, now: float) -> LoadReport | None:
        """The report to send now, if one is due."""
        self._is_held_back = now - self._last_time < self._interval
        if self._is_held_back:
            return None
        report = self._report(stats)
        is_busy = stats.num_running + stats.num_waiting > 0
        most_silent_seconds = BUSY_SECONDS if is_busy else self._repeat_seconds
        if not self._says_more(report) and now - self._last_time < most_silent_seconds:
            return None
        self._arrived = []
        self._last, self._last_time = report, now
        return report

    def wait_seconds(self, now: float) -> float | None:
        """Until `due` should be asked again even if nothing happens; None: not before something does."""
        seconds = self._interval if self._is_held_back else self._repeat_seconds
        return None if seconds == float("inf") else max(0.0, self._last_time + seconds - now)

    def _says_more(self, report: LoadReport) -> bool:
        """Rates alone are no news: they change with every step."""
        last = self._last
        if last is None or report.arrived:
            return True
        rates = {name: getattr(last, name) for name in ("steps_per_second", "prefill_tokens_per_second")}
        return msgspec.structs.replace(report, **rates, arrived=last.arrived) != last

    def _report(self, stats: SchedulerStats) -> LoadReport:
        return LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            waiting_uncached_tokens=stats.waiting_uncached_tokens,
            running_uncached_tokens=stats.running_uncached_tokens,
            kv_used_tokens=stats.kv_used_tokens,
            kv_capacity_tokens=stats.kv_capacity_tokens,
            steps_per_second=stats.steps_per_second,
            prefill_tokens_per_second=stats.prefill_tokens_per_second,
            arrived=self._arrived,
            instance=self._instance,
            data_parallel_size=self._data_parallel_size,
            kv_transfer_port=self._kv_transfer_port,
        )
