"""How often a service's replicas were restarted, counted over passes: whatever the reason says just now, a loop shows.

A container is restarted by its kubelet, which counts that itself; a group of pods by the operator, which records it on
the group's StatefulSet or LeaderWorkerSet. What happened before the first pass over a service is not counted.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvasir_operator.api.labels import ROLE_LABEL
from kvasir_operator.groups.record import RestartRecord
from kvasir_operator.kube.kinds import GROUP_KINDS, ServiceKey, label_of, object_key
from kvasir_operator.observe.containers import all_containers, num_restarts
from kvasir_operator.observe.observe import Observed
from kvasir_operator.observe.replicas import group_of


class RestartCounter(Collector):
    """Its series go with their service."""

    def __init__(self) -> None:
        self._seen: dict[ServiceKey, dict[str, int]] = {}
        self._totals: dict[ServiceKey, Counter[str]] = {}

    def observe(self, key: ServiceKey, observed: Observed) -> None:
        """Adds what is new since the last call for this service; a role is at 0 before its first restart."""
        before = self._seen.get(key)
        now: dict[str, int] = {}
        totals = self._totals.setdefault(key, Counter())
        for uid, role, number in _restarts(observed):
            now[uid] = number
            totals[role] += 0 if before is None else _increase(before.get(uid, 0), number)
        self._seen[key] = now

    def forget(self, key: ServiceKey) -> None:
        self._seen.pop(key, None)
        self._totals.pop(key, None)

    def collect(self) -> Iterator[CounterMetricFamily]:
        restarts = CounterMetricFamily(
            "kvasir_operator_replica_restarts",
            "Restarts of a role's containers by kubelets, and of its groups of pods by the operator.",
            labels=["service_namespace", "inference_service", "role"],
        )
        for key, totals in self._totals.items():
            for role, total in totals.items():
                restarts.add_metric([*key, role], total)
        yield restarts


def _restarts(observed: Observed) -> Iterator[tuple[str, str, int]]:
    """(uid, role, restarts so far) of whatever is restarted as one: the pods of a group are."""
    single = [(pod, num_restarts(all_containers(pod))) for pod in observed.pods if group_of(pod) is None]
    sets = [child for child in observed.children if object_key(child).kind in GROUP_KINDS]
    groups = [(each, RestartRecord.of(each).num_restarts) for each in sets]
    for obj, number in (*single, *groups):
        if (role := label_of(obj, ROLE_LABEL)) is not None:
            yield obj["metadata"]["uid"], role, number


def _increase(before: int, now: int) -> int:
    """A group's count begins anew an hour after its last failure."""
    return now - before if now >= before else now
