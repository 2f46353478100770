"""Names that cross a border: API group, labels, ports, names of children (DESIGN.md section 2).

Each is written here once; the runtime and the router get theirs by flags.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

GROUP: Final = "serving.kvasir.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
SINGULAR: Final = "inferenceservice"
SHORT_NAME: Final = "kvsvc"

FIELD_MANAGER: Final = "kvasir-operator"

SERVICE_LABEL: Final = f"{GROUP}/service"
ROLE_LABEL: Final = f"{GROUP}/role"
REVISION_LABEL: Final = f"{GROUP}/revision"
GROUP_LABEL: Final = f"{GROUP}/group"
"""Name of the StatefulSet, or LeaderWorkerSet, whose pods are one replica together."""
RANK_LABEL: Final = "apps.kubernetes.io/pod-index"
"""Kubernetes' own, on every pod of a StatefulSet: a template cannot hold what differs between its pods.

It is the rank in a LeaderWorkerSet of one replica too: its leader is number 0 of one StatefulSet, and the other one
numbers its workers from 1.
"""
LEADER_WORKER_SET_LABEL: Final = "leaderworkerset.sigs.k8s.io/name"
"""Of LeaderWorkerSet's own, on every pod of one."""
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"

ROLE_SERVE: Final = "serve"
ROLE_PREFILL: Final = "prefill"
ROLE_DECODE: Final = "decode"
ROLE_ROUTER: Final = "router"
ROLE_RENDEZVOUS: Final = "rendezvous"
"""Of the Services by which pods of groups find one another: no role that routers send requests to."""
ENGINE_ROLES: Final = (ROLE_SERVE, ROLE_PREFILL, ROLE_DECODE)
ROLES: Final = (*ENGINE_ROLES, ROLE_ROUTER)
"""In the order in which a status shows them."""

ENGINE_HTTP_PORT: Final = 8000
OWN_CONTAINERS: Final = ("engine", "router")
"""What else runs in a pod (a service mesh's proxy, an agent of logs) was put there by others."""
MODEL_LOADER: Final = "model-loader"
DRAFT_MODEL_LOADER: Final = "draft-model-loader"
LOADERS: Final = (MODEL_LOADER, DRAFT_MODEL_LOADER)
"""Init containers of engine pods; they answer on the engine's HTTP port before it does."""
MODEL_CACHE: Final = "model-cache"
"""Volume of engine pods that the loaders fill."""
ENGINE_KV_EVENTS_PORT: Final = 5557
ENGINE_KV_REPLAY_PORT: Final = 5657
ENGINE_KV_TRANSFER_PORT: Final = 5600
"""Data-parallel rank r takes the port of each of these three that is r higher, so they lie apart."""
ENGINE_RENDEZVOUS_PORT: Final = 29500
ROUTER_HTTP_PORT: Final = 8080
ROUTER_ADMIN_PORT: Final = 9090
ROUTER_PEERS_PORT: Final = 5559
OPERATOR_PORT: Final = 9090

ROUTER_SECRET_ENV: Final = "KVASIR_ROUTER_SECRET"
"""What a service's router proves itself with to its engines."""
GATEWAY_SECRET_ENV: Final = "KVASIR_GATEWAY_SECRET"
"""What the secrets of all services behind the gateway are derived from."""

TRAFFIC_WEIGHT: Final = f"{GROUP}/traffic-weight"
"""Label of a revision's Service: per cent of the requests that it gets. EndpointSlices get labels, no annotations.

It is an annotation of the Service too, by which the operator knows a canary whose label somebody took away.
"""
REVISION_NUMBER: Final = f"{GROUP}/revision-number"
"""Annotation of a revision's Deployments: the order in which revisions were used, the current one's the highest."""
GROUP_SIZE: Final = f"{GROUP}/group-size"
"""Annotation of a group's StatefulSet: its pods while it runs, which `replicas` does not say of one kept at 0."""

# Names of Services, labels' values and host names of pods.
MAX_NAME_LENGTH: Final = 63
# A StatefulSet gives its pods a label that holds its name, a dash and a digest of up to ten characters.
_MAX_GROUP_NAME_LENGTH: Final = 52
# The StatefulSet of a LeaderWorkerSet's workers has its name and `-0`.
_MAX_LEADER_WORKER_SET_NAME_LENGTH: Final = 50
_DIGEST_LENGTH = 8


def child_name(service_name: str, *parts: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """`SERVICE-PART-PART`; the service's name is cut, and told apart by a digest, where that is too long."""
    suffix = "".join(f"-{part}" for part in parts)
    if len(service_name) + len(suffix) <= max_length:
        return service_name + suffix
    digest = hashlib.sha256(service_name.encode()).hexdigest()[:_DIGEST_LENGTH]
    kept = service_name[: max_length - len(suffix) - _DIGEST_LENGTH - 1].rstrip("-")
    return f"{kept}-{digest}{suffix}"


def engine_name(service_name: str) -> str:
    """Name of what all engines of a service share: ServiceAccount, NetworkPolicy, PodMonitor."""
    return child_name(service_name, "engine")


def role_name(service_name: str, role: str) -> str:
    """Name of what a role's revisions share: its PodDisruptionBudget."""
    return child_name(service_name, role)


def workload_name(service_name: str, role: str, revision: str) -> str:
    """Name of the Deployment and the headless Service of one engine role's revision."""
    return child_name(service_name, role, revision)


def group_name(service_name: str, role: str, revision: str, index: int) -> str:
    """Name of the StatefulSet of one group of pods, a replica of an engine role's revision."""
    return child_name(service_name, role, revision, str(index), max_length=_MAX_GROUP_NAME_LENGTH)


def leader_worker_set_name(service_name: str, role: str, revision: str, index: int) -> str:
    """As `group_name`, where the group is a LeaderWorkerSet."""
    return child_name(service_name, role, revision, str(index), max_length=_MAX_LEADER_WORKER_SET_NAME_LENGTH)


def group_index(name: str) -> int:
    """Of a group, from `group_name`."""
    return int(name.rpartition("-")[2])


def rendezvous_name(service_name: str, role: str) -> str:
    """Name of the headless Service by which the pods of a role's groups find one another."""
    return child_name(service_name, role, "ranks")


def router_peers_name(service_name: str) -> str:
    """Name of the headless Service by which a service's routers find one another."""
    return child_name(service_name, "router", "peers")


def router_name(service_name: str) -> str:
    """Name of the router's Deployment, Service, ServiceAccount, RoleBinding, Secret and PodDisruptionBudget."""
    return child_name(service_name, ROLE_ROUTER)


def gateway_secret_name(service_name: str, digest: str | None) -> str:
    """Name of the Secret of a service behind the gateway; `digest` is of its value, None where there is no gateway."""
    return child_name(service_name, "gateway", *(() if digest is None else (digest,)))


def service_labels(service_name: str) -> dict[str, str]:
    """Labels of every child of a service; also what the operator lists its children by."""
    return {MANAGED_BY_LABEL: FIELD_MANAGER, SERVICE_LABEL: service_name}


def role_labels(service_name: str, role: str) -> dict[str, str]:
    """Labels of a child that belongs to one role."""
    return {**service_labels(service_name), ROLE_LABEL: role}


def role_selector(service_name: str, role: str) -> dict[str, str]:
    """The smallest label set that selects a role's pods of every revision."""
    return {SERVICE_LABEL: service_name, ROLE_LABEL: role}


def revision_selector(service_name: str, role: str, revision: str) -> dict[str, str]:
    """The smallest label set that selects the pods of one engine role's revision."""
    return {**role_selector(service_name, role), REVISION_LABEL: revision}


def selector_text(selector: Mapping[str, str | None]) -> str:
    """A label selector as the API writes it in a query or in `status.selector`; None stands for any value."""
    return ",".join(key if value is None else f"{key}={value}" for key, value in selector.items())
