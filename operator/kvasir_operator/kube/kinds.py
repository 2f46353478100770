"""The kinds of Kubernetes object that the operator reads and writes, and how an object is named.

The table is fixed on purpose: an operator acts only on kinds that its Role names. Most of them every cluster serves;
which of OPTIONAL_KINDS this one does, kube/features.py asks.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from kvasir_operator.api.labels import API_VERSION, KIND, PLURAL

KubeObject: TypeAlias = dict[str, Any]


class Kind(NamedTuple):
    """A namespaced kind: `api_version` is `GROUP/VERSION`, or `v1` for the core group.

    A tuple, since each pass compares and hashes hundreds of keys that hold one.
    """

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        group, _, version = self.api_version.rpartition("/")
        return group if version else ""

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]


INFERENCE_SERVICE = Kind(API_VERSION, KIND, PLURAL)
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
SERVICE = Kind("v1", "Service", "services")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")

# In the order in which a service's children are applied: what pods need comes before the pods.
CHILD_KINDS = (
    SERVICE_ACCOUNT,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    DEPLOYMENT,
    STATEFUL_SET,
    LEADER_WORKER_SET,
)
# Of which each object is one replica of several pods.
GROUP_KINDS = (STATEFUL_SET, LEADER_WORKER_SET)
WORKLOAD_KINDS = (DEPLOYMENT, *GROUP_KINDS)
# Served only where somebody installed their CRDs.
OPTIONAL_KINDS = (LEADER_WORKER_SET, POD_MONITOR)
# Found by label and watched. Who may list Secrets may read all of them, so a service's own is asked for by its name.
LISTED_CHILD_KINDS = tuple(kind for kind in CHILD_KINDS if kind != SECRET)


def listed_child_kinds(served: Collection[Kind]) -> tuple[Kind, ...]:
    """Those that a cluster knows; `served`: of optional ones."""
    return tuple(kind for kind in LISTED_CHILD_KINDS if kind not in OPTIONAL_KINDS or kind in served)


_BY_NAME = {(kind.api_version, kind.kind): kind for kind in (INFERENCE_SERVICE, *CHILD_KINDS, POD, EVENT, LEASE)}


class NamespacedName(NamedTuple):
    """Names one object of a kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


ServiceKey: TypeAlias = NamespacedName
"""Names one InferenceService; the unit of work of the queue."""


def service_key(service: Mapping[str, Any]) -> ServiceKey:
    return ServiceKey(service["metadata"]["namespace"], service["metadata"]["name"])


class ObjectKey(NamedTuple):
    """Names one child within its service's namespace."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.kind.kind} {self.name}"


def kind_of(obj: KubeObject) -> Kind:
    """Raises KeyError for a kind that the operator's table, and so its Role, does not hold."""
    return _BY_NAME[(obj["apiVersion"], obj["kind"])]


def object_key(obj: KubeObject) -> ObjectKey:
    return ObjectKey(kind_of(obj), obj["metadata"]["name"])


def is_terminating(obj: KubeObject) -> bool:
    return obj["metadata"].get("deletionTimestamp") is not None


def label_of(obj: KubeObject, name: str) -> str | None:
    """Of an object or a pod's template; None where it has none of that name."""
    value: str | None = obj["metadata"].get("labels", {}).get(name)
    return value


def annotation_of(obj: KubeObject, name: str) -> str | None:
    value: str | None = obj["metadata"].get("annotations", {}).get(name)
    return value


def pod_template(workload: KubeObject) -> KubeObject:
    """Of a LeaderWorkerSet of ours leader and workers have one."""
    spec = workload["spec"]
    is_led = kind_of(workload) == LEADER_WORKER_SET
    template: KubeObject = spec["leaderWorkerTemplate"]["workerTemplate"] if is_led else spec["template"]
    return template


def seconds_between(start: str, end: str) -> float:
    """Of two times as objects have them (RFC 3339)."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
