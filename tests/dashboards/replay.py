"""Ten scrapes of an installation that all programs' own code has filled, for a Prometheus that has scraped nothing.

Every sample of every program grows by one a scrape, so that rates and quantiles have something to say.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.engine_series import engine_registry
from tests.dashboards.prometheus import Graphed, Range
from tests.dashboards.series import as_stored_labels, operator_metrics, ranked_engine, router_exposition

OVER = Range(1_790_000_000.0, 1_790_000_090.0, 10.0)
_SERVICE = {"namespace": "models", "inference_service": "llama"}


def scraped(folder: Path) -> Iterator[Graphed]:
    """`folder` takes engines' shared rows. The split service has one engine of each role."""
    plain, ranked = generate_latest(engine_registry(folder)), generate_latest(ranked_engine(folder))
    yield from _of_pod(plain, {**_SERVICE, "role": "serve", "pod": "llama-serve-0", "endpoint": "http"})
    for role in ("prefill", "decode"):
        yield from _of_pod(ranked, {**_SERVICE, "role": role, "pod": f"llama-{role}-0", "endpoint": "http"})
    yield from _of_pod(router_exposition(), {**_SERVICE, "role": "router", "pod": "router-0", "endpoint": "admin"})
    system = {"namespace": "kvasir-system", "pod": "operator-0", "endpoint": "metrics"}
    yield from _of_pod(generate_latest(operator_metrics().registry), system)


def _of_pod(exposition: bytes, target: dict[str, str]) -> Iterator[Graphed]:
    times = [OVER.start + OVER.step * number for number in range(10)]
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            labels = {**as_stored_labels(sample.labels, frozenset(target)), **target, "__name__": sample.name}
            yield Graphed(labels, [(at, sample.value + number) for number, at in enumerate(times)])
