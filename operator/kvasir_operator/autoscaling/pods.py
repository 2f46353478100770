"""What a service's pods say for a decision: which take requests and since when, and how long they took to start."""

from collections.abc import Iterable
from datetime import datetime
from statistics import median

from kvasir_operator.api.labels import ROLE_ROUTER
from kvasir_operator.autoscaling.situation import COLD_SECONDS
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.observe.containers import num_restarts, own_containers
from kvasir_operator.observe.replicas import Replica, of_role, replicas_of
from kvasir_operator.observe.waiting import is_ready

DEFAULT_STARTUP_SECONDS = 120.0
LEAST_STARTUP_SECONDS = 5.0
MOST_STARTUP_SECONDS = 1800.0
"""What became ready later than this after its creation has come back, not started."""


def ready_seconds(pods: Iterable[KubeObject], role: str, now: float) -> dict[str, float]:
    """Of pods that take requests, by name, for how long they have; of a group its first pod."""
    leaders = (each.leader for each in _replicas(pods, role))
    return seconds_ready((leader for leader in leaders if leader is not None), now)


def seconds_ready(pods: Iterable[KubeObject], now: float) -> dict[str, float]:
    """Of those that are ready, by name."""
    return {pod["metadata"]["name"]: max(0.0, now - _ready_at(pod)) for pod in pods if is_ready(pod)}


def is_beginning(pods: Iterable[KubeObject], role: str, now: float) -> bool:
    """None of the role, and no router of the service's own, has been ready for long enough to have series."""
    pods = list(pods)
    ready = {**ready_seconds(pods, ROLE_ROUTER, now), **ready_seconds(pods, role, now)}
    return all(seconds < COLD_SECONDS for seconds in ready.values())


def startup_seconds(pods: Iterable[KubeObject], role: str) -> float:
    """From a pod's creation until it was ready: the median of those that are. A pod that was restarted in place has
    become ready again, and when it did first nothing says."""
    leaders = [each.leader for each in _replicas(pods, role) if each.is_ready]
    firsts = [pod for pod in leaders if pod is not None and not num_restarts(own_containers(pod))]
    seconds = [_ready_at(pod) - _unix(pod["metadata"]["creationTimestamp"]) for pod in firsts]
    starts = [each for each in seconds if each <= MOST_STARTUP_SECONDS]
    return max(median(starts), LEAST_STARTUP_SECONDS) if starts else DEFAULT_STARTUP_SECONDS


def pod_names(pods: Iterable[KubeObject], role: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in of_role(pods, role)}


def _replicas(pods: Iterable[KubeObject], role: str) -> list[Replica]:
    return replicas_of(of_role(pods, role))


def _ready_at(pod: KubeObject) -> float:
    conditions = pod["status"]["conditions"]
    ready = next(condition for condition in conditions if condition["type"] == "Ready")
    return _unix(ready.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])


def _unix(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
