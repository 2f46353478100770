"""The series of KV events and load reports: read when they are scraped, from what each service's feed counts anyway."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvasir_router.fleet_series import FleetSeries
from kvasir_router.prefix_index.event_statistics import EventStatistics
from kvasir_router.service.event_feed import EventFeed

_EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class KvEventCollector(Collector):
    """`feeds` are those of now; what one has counted is lost with its service."""

    def __init__(self, feeds: Callable[[], Iterable[EventFeed]]) -> None:
        self._feeds = feeds

    def collect(self) -> Iterable[Metric]:
        feeds, total = tuple(self._feeds()), EventStatistics()
        for feed in feeds:
            total.add(feed.statistics())
        events = CounterMetricFamily("kvasir_router_kv_events", "KV events of engines, by type.", labels=["type"])
        for event_type in _EVENT_TYPES:
            events.add_metric([event_type], total.num_events[event_type])
        yield events
        for name, text, value in (
            ("kv_events_skipped", "KV events that are unknown or about another tier.", total.num_skipped),
            ("kv_event_messages_malformed", "Messages of engines that cannot be read.", total.num_malformed),
            ("kv_event_gaps", "Messages found missing.", total.num_gaps),
            ("kv_event_losses", "Gaps that no replay has filled.", total.num_losses),
            ("kv_event_replays", "Replays asked for, to see whether something is missing too.", total.num_replays),
            ("kv_event_replays_failed", "Replays that did not come to their end.", total.num_failed_replays),
            ("load_reports", "Load reports of engines.", total.num_load_reports),
            ("kv_blocks_orphaned", "Blocks stored after one that is not known.", sum(f.num_orphans for f in feeds)),
            (
                "kv_blocks_refused",
                "Blocks beyond --kv-index-size, which are not believed.",
                sum(f.num_refused for f in feeds),
            ),
        ):
            yield CounterMetricFamily(f"kvasir_router_{name}", text, value=value)
        yield GaugeMetricFamily(
            FleetSeries.KV_BLOCKS.value, "Blocks known to be cached, of all endpoints.", sum(f.num_held for f in feeds)
        )
        lag = max((feed.max_lag_seconds for feed in feeds), default=0.0)
        yield GaugeMetricFamily(FleetSeries.KV_EVENT_LAG_SECONDS.value, "Of the endpoint that is furthest behind.", lag)
