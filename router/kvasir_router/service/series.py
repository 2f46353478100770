"""Series of each service behind a gateway, made when they are scraped: a service that is gone leaves none behind.

What is counted by model needs none of these: behind a gateway a model's name is one service's.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvasir_router.fleet_series import FleetSeries
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.service import Service

# As the operator's own series call a service.
_LABELS = ("service_namespace", "inference_service")


class ServiceCollector(Collector):
    """`services` are called `namespace/name`."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

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
    text = "Known endpoints by service and state."
    return GaugeMetricFamily(FleetSeries.SERVICE_ENDPOINTS.value, text, labels=(*_LABELS, "state"))


def _queue_depth() -> GaugeMetricFamily:
    text = "Requests held in the queue of a service."
    return GaugeMetricFamily("kvasir_router_service_queue_depth", text, labels=_LABELS)
