"""Series of each service, made when they are scraped: a service that is gone leaves none behind.

What is counted by model needs no collector for a gateway: there a model's name is one service's.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvasir_router.fleet_series import FleetSeries
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.service import Service

# As the operator's own series call a service.
_LABELS = ("service_namespace", "inference_service")


class ServiceCollector(Collector):
    """Of a gateway, whose services are called `namespace/name`."""

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


class WakeCollector(Collector):
    """Wakes by service: the histogram is there before a service's first wake, since Prometheus wants to see it grow."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

    def describe(self) -> Iterator[HistogramMetricFamily]:
        text = "First request of a service without ready engines until one is sent to an engine."
        yield HistogramMetricFamily("kvasir_router_wake_seconds", text, labels=("service",))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        for service in self._services:
            family.add_metric([service.name], service.wakes.buckets(), service.wakes.sum_seconds)
        yield family


class RebalancingCollector(Collector):
    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

    def describe(self) -> Iterator[CounterMetricFamily]:
        text = "Running streams that an overfull engine was to hand over to one with room."
        yield CounterMetricFamily("kvasir_router_rebalanced_streams", text, labels=("service", "outcome"))

    def collect(self) -> Iterator[CounterMetricFamily]:
        (family,) = self.describe()
        for service in self._services:
            for outcome, number in service.rebalancing.num_by_outcome.items():
                family.add_metric([service.name, outcome.value], number)
        yield family
