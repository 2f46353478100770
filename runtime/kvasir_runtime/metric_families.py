"""Families of series with labels in common, as prometheus_client's collectors yield them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Keys = tuple[str, ...]
"""Values of a family's further labels."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram shows: a count per bucket, of which the last has no bound. No counts: nothing came yet."""

    bounds: Sequence[float]
    counts: Sequence[float]
    sum: float

    def cumulative(self) -> list[tuple[str, float]]:
        """Bounds are written as Python's floats, as dashboards quote them."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts or [0] * len(names)), strict=True))


class Families:
    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        """`labels`: of all series."""
        self._prefix = prefix
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        """`values`: one, or one for each `Keys`."""
        return self._filled(GaugeMetricFamily(self._prefix + name, text, labels=[*self._names, *labels]), values)

    def counter(self, name: str, text: str, values: float | Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(self._prefix + name, text, labels=[*self._names, *labels]), values)

    def histogram(
        self, name: str, text: str, values: Distribution | Mapping[Any, Distribution], *labels: str
    ) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=[*self._names, *labels])
        for keys, each in ({(): values} if isinstance(values, Distribution) else values).items():
            family.add_metric([*self._values, *keys], each.cumulative(), each.sum)
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[Any, float]) -> Metric:
        for keys, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric([*self._values, *keys], value)
        return family
