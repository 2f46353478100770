"""The series of several workers as those of one router. Pure: text in, text out.

Counts and what is held are added up; what every worker sees of the same engines is told once, as the most of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvasir_router.fleet_series import FleetSeries

_SEEN_BY_ALL = frozenset(FleetSeries)
# When a worker began to count is nothing that can be added up.
_CREATED = "_created"

_Labels = tuple[tuple[str, str], ...]


@dataclass
class _Series:
    text: str
    kind: str
    values: dict[tuple[str, _Labels], float] = field(default_factory=dict)
    """By the sample's name and labels, in their first order."""


def combined(expositions: Sequence[str]) -> bytes:
    """In Prometheus' text format, as each of `expositions` is."""
    registry = CollectorRegistry()
    registry.register(_Combined(expositions))
    return generate_latest(registry)


class _Combined(Collector):
    def __init__(self, expositions: Iterable[str]) -> None:
        self._series: dict[str, _Series] = {}
        for exposition in expositions:
            for metric in text_string_to_metric_families(exposition):
                if not metric.name.endswith(_CREATED):
                    self._add(metric)

    def collect(self) -> Iterator[Metric]:
        for name, series in self._series.items():
            metric = Metric(name, series.text, series.kind)
            for (sample, labels), value in series.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric

    def _add(self, metric: Metric) -> None:
        series = self._series.setdefault(metric.name, _Series(metric.documentation, metric.type))
        for sample in metric.samples:
            key = sample.name, tuple(sample.labels.items())
            before = series.values.get(key, 0.0)
            is_same = metric.name in _SEEN_BY_ALL
            series.values[key] = max(before, sample.value) if is_same else before + sample.value
