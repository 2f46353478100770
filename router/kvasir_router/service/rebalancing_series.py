"""The counter of streams that overfull engines were to hand over, made when it is scraped, as the other series of a
service that goes with it."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvasir_router.service.service import Service


class RebalancingCollector(Collector):
    def __init__(self, services: Iterable[Service]) -> None:
        self._services = services

    def describe(self) -> Iterator[CounterMetricFamily]:
        yield _family()

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = _family()
        for service in self._services:
            for outcome, number in service.rebalancing.num_by_outcome.items():
                family.add_metric([service.name, outcome.value], number)
        yield family


def _family() -> CounterMetricFamily:
    text = "Running streams that an overfull engine was to hand over to one with room."
    return CounterMetricFamily("kvasir_router_rebalanced_streams", text, labels=("service", "outcome"))
