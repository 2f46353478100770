"""Series of each service, made when they are scraped: a service that is gone leaves none behind.

What is counted by model needs no collector for a gateway: there a model's name is one service's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvasir_router.admission.queue import HeldDemand
from kvasir_router.prefix_index.subscriber import EventStatistics
from kvasir_router.service.event_feed import EventFeed
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.service import HeldByService, Service

# As the operator's own series call a service.
_LABELS = ("service_namespace", "inference_service")


_EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


_MAX_TENANTS = 50
_OTHERS = "_others"


class DemandCollector(Collector):
    """What waits in the queues: an autoscaler must see demand that no engine sees."""

    def __init__(self, held: Callable[[], HeldByService]) -> None:
        self._held = held

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("service", "tenant")
        requests = GaugeMetricFamily(
            "kvasir_router_queued_requests",
            "Requests held in the router's queue, streams that wait to be resumed included.",
            labels=labels,
        )
        tokens = GaugeMetricFamily(
            "kvasir_router_queued_tokens",
            "Prompt tokens of requests in the router's queue that no engine has cached.",
            labels=labels,
        )
        for service, held in self._held().items():
            for tenant, demand in bounded(held).items():
                requests.add_metric((service, tenant), demand.num_requests)
                tokens.add_metric((service, tenant), demand.num_tokens)
        yield from (requests, tokens)


def bounded(held: Mapping[str, HeldDemand], max_tenants: int = _MAX_TENANTS) -> Mapping[str, HeldDemand]:
    """Those with the most tokens, and all others in one. Where nobody waits, one tenant without a name does not."""
    by_tokens = sorted(held, key=lambda tenant: held[tenant].num_tokens, reverse=True)
    shown = {tenant: held[tenant] for tenant in by_tokens[:max_tenants]}
    others = [held[tenant] for tenant in by_tokens[max_tenants:]]
    if others:
        others.append(shown.get(_OTHERS, HeldDemand(0, 0)))
        shown[_OTHERS] = HeldDemand(sum(one.num_requests for one in others), sum(one.num_tokens for one in others))
    return shown or {"": HeldDemand(0, 0)}


class KvEventCollector(Collector):
    """`feeds` are those of now; what one has counted is lost with its service."""

    def __init__(self, feeds: Callable[[], Iterable[EventFeed]]) -> None:
        self._feeds = feeds

    def collect(self) -> Iterable[Metric]:
        feeds, total = tuple(self._feeds()), EventStatistics()
        for feed in feeds:
            total.add(feed.statistics())
        events = CounterMetricFamily(
            "kvasir_router_kv_events", "KV events that engines have sent, by type.", labels=["type"]
        )
        for event_type in _EVENT_TYPES:
            events.add_metric([event_type], total.num_events[event_type])
        yield events
        for name, text, value in (
            (
                "kv_events_skipped",
                "KV events passed over: unknown ones, and those about another tier of memory.",
                total.num_skipped,
            ),
            ("kv_event_messages_malformed", "Messages of KV events or load that cannot be read.", total.num_malformed),
            ("kv_event_gaps", "Messages of KV events found missing.", total.num_gaps),
            ("kv_event_losses", "Gaps in KV events that no replay has filled.", total.num_losses),
            ("kv_event_replays", "Replays of KV events asked for.", total.num_replays),
            (
                "kv_event_replays_failed",
                "Replays of KV events that did not come to their end.",
                total.num_failed_replays,
            ),
            ("load_reports", "Load reports that engines have sent.", total.num_load_reports),
            (
                "kv_blocks_orphaned",
                "KV blocks stored after one that is not known, and so matched by no prompt.",
                sum(feed.index.num_orphans for feed in feeds),
            ),
            (
                "kv_blocks_refused",
                "KV blocks beyond --kv-index-size, which are not believed.",
                sum(feed.index.num_refused for feed in feeds),
            ),
        ):
            yield CounterMetricFamily(f"kvasir_router_{name}", text, value=value)
        yield GaugeMetricFamily(
            "kvasir_router_kv_blocks",
            "KV blocks known to be cached, of all engines together.",
            sum(feed.index.num_held for feed in feeds),
        )
        lag = max((feed.max_lag_seconds for feed in feeds), default=0.0)
        yield GaugeMetricFamily(
            "kvasir_router_kv_event_lag_seconds",
            "Seconds by which KV events come late, of the engine that is furthest behind.",
            lag,
        )


class _OfServices(Collector):
    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services


class ServiceCollector(_OfServices):
    """Of a gateway, whose services are called `namespace/name`."""

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from (_endpoints(), _queue_depth())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        endpoints, queue_depth = _endpoints(), _queue_depth()
        for service in self._services:
            labels = service.name.split("/")
            queue_depth.add_metric(labels, service.admission.num_waiting)
            for state in EndpointState:
                endpoints.add_metric([*labels, state.value], service.registry.num_in_state(state))
        yield from (endpoints, queue_depth)


def _endpoints() -> GaugeMetricFamily:
    text = "Engines that the gateway knows, by service and state."
    return GaugeMetricFamily("kvasir_router_service_endpoints", text, labels=(*_LABELS, "state"))


def _queue_depth() -> GaugeMetricFamily:
    text = "Requests held in a service's queue now."
    return GaugeMetricFamily("kvasir_router_service_queue_depth", text, labels=_LABELS)


class WakeCollector(_OfServices):
    """Wakes by service: the histogram is there before a service's first wake, since Prometheus wants to see it grow."""

    def describe(self) -> Iterator[HistogramMetricFamily]:
        text = "Seconds from the first request of a service without ready engines until one is sent to an engine."
        yield HistogramMetricFamily("kvasir_router_wake_seconds", text, labels=("service",))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        for service in self._services:
            family.add_metric([service.name], service.wakes.buckets(), service.wakes.sum_seconds)
        yield family
