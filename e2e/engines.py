"""The engines of a service through a fault: which one to strike, and when the service is whole again without it.

A restarted container is another engine than before: "whole without the victim" holds for a restart and for a new pod.
"""

from collections.abc import Callable
from dataclasses import dataclass

from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveService, is_pod_ready, name_of, role_of, uid_of
from e2e.watch import State
from tests.controlplane.processes import wait_until

ENGINE_ROLES = ("serve", "prefill", "decode")
RANK_LABEL = "apps.kubernetes.io/pod-index"
WORK = "kvasir_(num_requests_(running|waiting|held)|kv_transfer_leased_blocks)"


@dataclass(frozen=True)
class Engine:
    """One life of an engine's container in a ready pod; `container` is the container runtime's id of it."""

    pod: str
    uid: str
    node: str
    container: str
    num_restarts: int


def busy_engine(
    service: LiveService, is_candidate: Callable[[Engine], bool] = lambda engine: True, role: str = "serve"
) -> Engine:
    """The one with most streams under way, of the least restarted: a kubelet lets one that ends often wait longer."""

    def found() -> Engine | None:
        pods = [pod for pod in service.pods(role) if is_pod_ready(pod) and is_candidate(engine_of(pod))]
        streams = {engine_of(pod): service.metric(pod, "kvasir_num_requests_running") for pod in pods}
        busy = [engine for engine, num_streams in streams.items() if num_streams > 0]
        return min(busy, key=lambda engine: (engine.num_restarts, -streams[engine]), default=None)

    return wait_until(found, 60, f"an engine of {service.name} with streams under way", POLL_SECONDS)


def is_whole_without(victim: Engine, num_engines: int) -> Callable[[State], bool]:
    """Whether so many engines are ready, the victim not among them."""

    def holds(pods: State) -> bool:
        ready = ready_engines(pods)
        return len(ready) >= num_engines and victim.container not in {engine.container for engine in ready}

    return holds


def ready_engines(pods: State) -> list[Engine]:
    return [engine_of(pod) for pod in pods.values() if _takes_requests(pod) and is_pod_ready(pod)]


def num_resumed(service: LiveService) -> int:
    """Streams that the routers have so far carried on with another engine than they began with."""
    return int(sum(service.metric(pod, "kvasir_router_streams_resumed_total") for pod in service.pods("router")))


def wait_idle(service: LiveService) -> None:
    """Until no engine computes or keeps anything, also for clients and routers that are gone."""

    def is_idle() -> bool:
        pods = [
            pod for role in ENGINE_ROLES for pod in service.pods(role) if _takes_requests(pod) and is_pod_ready(pod)
        ]
        return not any(service.metric(pod, WORK) for pod in pods)

    wait_until(is_idle, 60, f"the engines of {service.name} to be idle", POLL_SECONDS)


def telling_to_go(service: LiveService) -> Callable[[Engine], None]:
    """Deletes an engine's pod as a node's drain does."""

    def strike(victim: Engine) -> None:
        service.tell_to_go(victim.pod)

    return strike


def _takes_requests(pod: KubeObject) -> bool:
    """Of a group only its first pod does; the pod of the load has no labels."""
    return role_of(pod) in ENGINE_ROLES and pod["metadata"]["labels"].get(RANK_LABEL, "0") == "0"


def engine_of(pod: KubeObject) -> Engine:
    """As its container lives now."""
    [container] = pod["status"]["containerStatuses"]
    node, life = pod["spec"]["nodeName"], container["containerID"]
    return Engine(name_of(pod), uid_of(pod), node, life, container["restartCount"])
