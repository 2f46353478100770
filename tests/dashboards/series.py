"""Every series that the three programs can have, with its labels as Prometheus stores them, out of their own code."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.contract.engine_series import engine_registry
from tests.router.parts import a_request, an_endpoint

from kvasir_operator.api.manifests import load_manifests
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.situation import Verdict
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.resources.pod_monitor import pod_monitor
from kvasir_operator.settings import OperatorSettings
from kvasir_router.admission.queue import HeldDemand
from kvasir_router.metrics import Metrics
from kvasir_router.placement.placement import Leg, LocalPrefill, Placement
from kvasir_router.service.series import (
    DemandCollector,
    KvEventCollector,
    ServiceCollector,
    WakeCollector,
)
from kvasir_router.service.service import Service, Wakes
from kvasir_runtime.engine.messages import EngineReady
from kvasir_runtime.metrics import EngineView, MetricsCollector
from kvasir_runtime.parallel.counts import CollectiveCounts, CollectiveTotals
from kvasir_runtime.request_metrics import request_rows
from kvasir_runtime.requests.stats import SchedulerStats
from kvasir_runtime.transfer.metrics import TransferStats

Labels = frozenset[str]

ROOT = Path(__file__).parents[2]
OF_PODS = frozenset({"namespace", "pod", "container", "endpoint", "job", "instance"})
"""What the Prometheus operator gives to series of a PodMonitor, or Prometheus to all."""


def known_series(folder: Path) -> dict[str, Labels]:
    """Labels by the name of a sample (`..._bucket`, `..._total`); `folder` takes an engine's shared rows."""
    of_service = OF_PODS | monitored_labels()
    engine = generate_latest(engine_registry(folder)) + generate_latest(ranked_engine(folder))
    return {
        **as_stored(engine, of_service),
        **as_stored(router_exposition(), of_service),
        **as_stored(generate_latest(operator_metrics().registry), OF_PODS),
    }


def monitored_labels() -> Labels:
    """Those that the PodMonitors of a service put on its series."""
    [service] = load_manifests(ROOT / "examples" / "quickstart.yaml").services
    settings = OperatorSettings()
    [role] = engine_roles(service, settings.defaults)
    monitor = pod_monitor(service, role, settings)
    assert monitor is not None
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    return frozenset(each["targetLabel"] for each in endpoint["relabelings"])


def as_stored(exposition: bytes, target_labels: Labels) -> dict[str, Labels]:
    found: dict[str, Labels] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            own = frozenset(as_stored_labels(sample.labels, target_labels))
            found[sample.name] = found.get(sample.name, frozenset()) | own | target_labels
    return found


def as_stored_labels(own: Mapping[str, str], target_labels: Labels) -> dict[str, str]:
    """A label of the program's own that its target has too is called `exported_...`."""
    return {f"exported_{name}" if name in target_labels else name: value for name, value in own.items()}


def ranked_engine(folder: Path) -> CollectorRegistry:
    """An engine with several ranks, drafts, and KV that it exchanges: what `engine_registry` has none of."""
    stats = SchedulerStats(
        num_running=1, num_waiting=0, num_blocks_used=1, num_blocks=2, num_steps=1, num_preemptions=0,
        num_prefix_queries=1, num_prefix_hits=0, last_step_time=1.0, num_accepted_per_position=[1],
        transfers=TransferStats(),
    )  # fmt: skip
    ready = EngineReady(
        max_model_len=64, max_num_seqs=4, vocab_size=10, num_blocks=2, block_size=16, device="cpu",
        attention_backend="cpu", startup_seconds={"load_weights": 1.0},
    )  # fmt: skip
    ranks = CollectiveCounts()
    ranks.count("all_reduce", 8)
    collectives = CollectiveTotals(folder, 1)
    collectives.write(0, [{"tensor": ranks}])
    view = EngineView(ready=ready, stats=stats, stats_by_core=[stats, stats])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector("model", request_rows(folder, 1), lambda: view, collectives))
    return registry


def router_exposition() -> bytes:
    """After one of each thing that a router counts by label."""
    metrics = Metrics()
    metrics.observe_queue(lambda: 0)
    metrics.add(DemandCollector(lambda: {"models/llama": {"": HeldDemand(1, 2)}}))
    metrics.observe_bodies(lambda: 0)
    metrics.observe_connections(lambda: 0)
    metrics.observe_endpoints(lambda state: 0)
    metrics.observe_ejected(lambda: 0)
    metrics.add(ServiceCollector(gateway_services()))
    metrics.add(WakeCollector(gateway_services()))
    metrics.add(KvEventCollector(lambda: []))
    leg = Leg(an_endpoint("http://10.0.0.1:8000"), 0, 100)
    metrics.count_dispatch(a_request(), Placement(leg, local_prefill=LocalPrefill.SHORT), "finishTime", 0.001)
    metrics.count_end("m", 200, 1.0, 0.1)
    metrics.count_remote_prefill_error("revision", "broken")
    metrics.time_to_first_byte("m").observe(0.1)
    metrics.revision_requests("revision", "200").inc()
    metrics.retries("broken").inc()
    return metrics.render()


def gateway_services() -> Iterable[Service]:
    """As far as their series look at one."""
    wakes = Wakes()
    wakes.asked_for(0.0, 60.0)
    wakes.sent(20.0, has_waited=True)
    one: Any = SimpleNamespace(
        name="models/llama",
        admission=SimpleNamespace(num_waiting=0),
        registry=SimpleNamespace(num_in_state=lambda state: 0),
        wakes=wakes,
    )
    return [cast(Service, one)]


def operator_metrics() -> OperatorMetrics:
    """After one of each thing that an operator counts by label."""
    metadata, ready = {"namespace": "models", "name": "llama"}, [{"type": "Ready", "status": "True"}]
    metrics = OperatorMetrics(lambda: [{"metadata": metadata, "spec": {}, "status": {"conditions": ready}}])
    metrics.count_pass(0.1, ValueError())
    metrics.count_request("create", "Deployment", None)
    metrics.count_request("create", "Deployment", ValueError())
    metrics.watch_queue(lambda: 1, lambda: 0.5)
    verdict = {"serve": Verdict(2, ScalingReason.KV_CACHE_DEMAND, "", 1.5)}
    metrics.show_scaling(ServiceKey("models", "llama"), verdict, verdict)
    return metrics


def label_values(query: str) -> tuple[str, str] | None:
    """(series, label) of a variable's query."""
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    return None if found is None else (found[1], found[2])
