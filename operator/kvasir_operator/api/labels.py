"""Names that cross a border: API group, labels, ports, names of children (DESIGN.md section 2).

Each is written here once; the runtime and the router are told theirs by flags.
"""

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
RANK_LABEL: Final = f"{GROUP}/rank"
POD_MONITOR_LABEL: Final = f"{GROUP}/pod-monitor"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"

ROLE_SERVE: Final = "serve"
ROLE_PREFILL: Final = "prefill"
ROLE_DECODE: Final = "decode"
ROLE_ROUTER: Final = "router"

ENGINE_HTTP_PORT: Final = 8000
ENGINE_KV_EVENTS_PORT: Final = 5557
ENGINE_KV_REPLAY_PORT: Final = 5558
ENGINE_NIXL_PORT: Final = 5600
ENGINE_RENDEZVOUS_PORT: Final = 29500
ROUTER_HTTP_PORT: Final = 8080
ROUTER_ADMIN_PORT: Final = 9090
OPERATOR_PORT: Final = 9090

ROUTER_SECRET_ENV: Final = "KVASIR_ROUTER_SECRET"
"""What a service's router proves itself with to its engines."""

# Children are named NAME-engine and NAME-router and a Service's name has 63 characters at most.
MAX_SERVICE_NAME_LENGTH: Final = 52


def engine_name(service_name: str) -> str:
    """Name of the engine's Deployment, headless Service, ServiceAccount and PodDisruptionBudget."""
    return f"{service_name}-engine"


def router_name(service_name: str) -> str:
    """Name of the router's Deployment, Service, ServiceAccount, Role, RoleBinding, Secret and PodDisruptionBudget."""
    return f"{service_name}-router"


def service_labels(service_name: str) -> dict[str, str]:
    """Labels of every child of a service; also what the operator lists its children by."""
    return {MANAGED_BY_LABEL: FIELD_MANAGER, SERVICE_LABEL: service_name}


def role_labels(service_name: str, role: str) -> dict[str, str]:
    """Labels of a child that belongs to one role."""
    return {**service_labels(service_name), ROLE_LABEL: role}


def role_selector(service_name: str, role: str) -> dict[str, str]:
    """The smallest label set that selects a role's pods; immutable in a Deployment, so it holds no revision."""
    return {SERVICE_LABEL: service_name, ROLE_LABEL: role}


def monitoring_labels(pod_monitor: str) -> dict[str, str]:
    """Of a pod that the chart's PodMonitors are to leave out; none of one that they scrape."""
    return {} if pod_monitor == "auto" else {POD_MONITOR_LABEL: pod_monitor}


def selector_text(selector: Mapping[str, str]) -> str:
    """A label selector as the API writes it in a query or in `status.selector`."""
    return ",".join(f"{key}={value}" for key, value in selector.items())
