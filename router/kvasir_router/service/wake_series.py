"""The histogram of wakes by service, made when it is scraped: it is there before a service's first wake, as Prometheus
needs to see an increase, and goes with the service."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from kvasir_router.service.service import Service


class WakeCollector(Collector):
    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield _family()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = _family()
        for service in self._services:
            family.add_metric([service.name], service.wakes.buckets(), service.wakes.sum_seconds)
        yield family


def _family() -> HistogramMetricFamily:
    text = "First request of a service without ready engines until one is sent to an engine."
    return HistogramMetricFamily("kvasir_router_wake_seconds", text, labels=("service",))
