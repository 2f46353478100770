"""What waits in the queues, as series read when they are scraped: an autoscaler must see demand that no engine sees."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvasir_router.admission.queue import HeldDemand

_MAX_TENANTS = 50
_OTHERS = "_others"
HeldByService = Mapping[str, Mapping[str, HeldDemand]]
"""By service, then by tenant; a service is there even where nothing of it waits."""


class DemandCollector(Collector):
    def __init__(self, held: Callable[[], HeldByService]) -> None:
        self._held = held

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("service", "tenant")
        requests = GaugeMetricFamily(
            "kvasir_router_queued_requests",
            "Requests held in the queue, streams that wait to be resumed included.",
            labels=labels,
        )
        tokens = GaugeMetricFamily(
            "kvasir_router_queued_tokens",
            "Prompt tokens of requests held in the queue that no engine has cached.",
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
