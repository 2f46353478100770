"""The PodMonitor of one role, by which a Prometheus operator has its pods scraped."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole, Role
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.settings import OperatorSettings

_SERVICE_META_LABEL = "__meta_kubernetes_pod_label_serving_kvasir_dev_service"
_ROLE_META_LABEL = "__meta_kubernetes_pod_label_serving_kvasir_dev_role"


def pod_monitor(service: InferenceService, role: Role, settings: OperatorSettings) -> dict[str, Any] | None:
    """For clusters that know the kind; None where the manifest wants none.

    Series get the labels `inference_service` and `role`, by which dashboards and alerts go.
    """
    if service.spec.monitoring.pod_monitor == "none":
        return None
    wanted = settings.defaults.pod_monitors
    endpoint = {
        "port": "http" if isinstance(role, EngineRole) else "admin",
        **({} if wanted.interval is None else {"interval": wanted.interval.text}),
        "relabelings": [
            {"sourceLabels": [_SERVICE_META_LABEL], "targetLabel": "inference_service"},
            {"sourceLabels": [_ROLE_META_LABEL], "targetLabel": "role"},
        ],
    }
    name = labels.role_name(service.name, role.name)
    described = metadata(service, name, role.name)
    described["labels"] = {**wanted.labels, **described["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": described,
        "spec": {
            "selector": {"matchLabels": labels.role_selector(service.name, role.name)},
            "podMetricsEndpoints": [endpoint],
        },
    }
