#!/usr/bin/env python3
"""Writes docs/reference/metrics.md from what operator, router and engine register; a test compares the two.

What a program shows in some configurations only, such as KV transfers, is switched on here.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvasir_operator.api import labels
from kvasir_operator.metrics import OperatorMetrics
from kvasir_router.metrics import Metrics
from kvasir_router.service.series import (
    DemandCollector,
    KvEventCollector,
    ServiceCollector,
    WakeCollector,
)
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.metrics import EngineView, MetricsCollector
from kvasir_runtime.parallel.counts import CollectiveTotals
from kvasir_runtime.parallel.topology import Topology
from kvasir_runtime.ranks.node import NodeCollector
from kvasir_runtime.ranks.status import NodeStatus
from kvasir_runtime.request_metrics import request_rows
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats

PAGE = Path(__file__).parent / "reference" / "metrics.md"
INTRODUCTION = f"""# Metrics

Every series of the three programs, at `/metrics`: of the operator's port {labels.OPERATOR_PORT}, of routers' and the
gateway's port {labels.ROUTER_ADMIN_PORT}, and of the engines' port {labels.ENGINE_HTTP_PORT}. Made by
`docs/metrics_page.py`. Of a histogram there are `_bucket`, `_count` and `_sum`. Engines also have those of
their API process (`process_resident_memory_bytes` and others).

Scraped by the PodMonitors of chart and operator, series have the labels `namespace` and `pod` too, those of engines
and routers also `inference_service` and `role`, of which the gateway's have `role`
alone. The [runbooks](../../charts/kvasir/RUNBOOKS.md) show what to ask of them.
"""


@dataclass(frozen=True)
class Series:
    """`name` as Prometheus has it, of a histogram without suffix; `labels` are the program's own."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def sample_names(self) -> list[str]:
        """As queries spell it."""
        suffixes = ("_bucket", "_count", "_sum") if self.kind == "histogram" else ("",)
        return [self.name + suffix for suffix in suffixes]


def series_of(registry: CollectorRegistry) -> Iterator[Series]:
    # The library says nowhere else which labels series have that have no sample yet.
    for collector in registry._collector_to_names:
        for family in collector.collect():
            own = collector if hasattr(collector, "_labelnames") else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Series(name, family.type, tuple(own._labelnames), family.documentation)


def router_registry() -> CollectorRegistry:
    metrics = Metrics()
    metrics.observe_queue(lambda: 0)
    metrics.add(DemandCollector(dict))
    metrics.add(WakeCollector([]))
    metrics.observe_bodies(lambda: 0)
    metrics.observe_connections(lambda: 0)
    metrics.observe_endpoints(lambda state: 0)
    metrics.add(ServiceCollector([]))
    metrics.observe_ejected(lambda: 0)
    metrics.observe_peers(lambda: 0)
    metrics.add(KvEventCollector(list))
    return metrics._registry


def engine_registry(folder: Path) -> CollectorRegistry:
    """Of the first node of an engine of several, with data-parallel ranks and KV transfers; `folder` takes its rows."""
    stats = SchedulerStats(
        num_running=0, num_waiting=0, num_blocks_used=0, num_blocks=1, num_steps=0, num_preemptions=0,
        num_prefix_queries=0, num_prefix_hits=0, last_step_time=0.0, prefill_tokens_per_second=0.0,
        transfers=TransferStats(),
    )  # fmt: skip
    ready = EngineReady(
        max_model_len=1, max_num_seqs=1, vocab_size=1, num_blocks=1, block_size=1, device="cpu",
        attention_backend="cpu", startup_seconds={},
    )  # fmt: skip
    view = EngineView(ready=ready, stats=stats, stats_by_core=[stats, stats])
    registry = CollectorRegistry()
    registry.register(MetricsCollector("model", request_rows(folder, 1), lambda: view, CollectiveTotals(folder, 1)))
    return registry


def node_registry(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(NodeCollector(NodeStatus(folder / "ranks", Topology().places())))
    return registry


def programs() -> dict[str, list[Series]]:
    """Series by program."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        registries = {
            "Operator": OperatorMetrics().registry,
            "Router and gateway": router_registry(),
            "Engine": engine_registry(folder),
            "Further nodes of an engine": node_registry(folder),
        }
        return {title: list(series_of(registry)) for title, registry in registries.items()}


def page() -> str:
    return "\n".join([INTRODUCTION, *(section(title, series) for title, series in programs().items())])


def section(title: str, series: Iterable[Series]) -> str:
    rows = [f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.meaning} |" for each in series]
    return "\n".join([f"## {title}", "", "| series | type | labels | |", "| --- | --- | --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
