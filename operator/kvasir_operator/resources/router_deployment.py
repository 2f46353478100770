"""The router's Deployment: pods that take clients' requests and pick an engine for each."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService, RouterSpec
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.probes import http_probe, liveness_probe
from kvasir_operator.resources.replicas import router_replicas
from kvasir_operator.resources.router_command import API_KEYS_FOLDER, router_command
from kvasir_operator.resources.router_secret import router_secret_env
from kvasir_operator.resources.topology_spread import topology_spread
from kvasir_operator.settings import OperatorSettings

# kube-proxy needs a moment to stop sending new connections to a pod that is going away.
_PRE_STOP_SECONDS = 5
_STOP_MARGIN_SECONDS = 15


def router_deployment(service: InferenceService, settings: OperatorSettings) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, labels.router_name(service.name), labels.ROLE_ROUTER),
        "spec": {
            "replicas": router_replicas(service),
            "selector": {"matchLabels": labels.role_selector(service.name, labels.ROLE_ROUTER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {"labels": _pod_labels(service)},
                "spec": _pod_spec(service, settings),
            },
        },
    }


def _pod_labels(service: InferenceService) -> dict[str, str]:
    own_labels = labels.role_labels(service.name, labels.ROLE_ROUTER)
    return {**own_labels, **labels.monitoring_labels(service.spec.monitoring.pod_monitor)}


def _pod_spec(service: InferenceService, settings: OperatorSettings) -> dict[str, Any]:
    router = service.spec.router
    volumes, mounts = _api_keys(router)
    drain_seconds = int(service.spec.rollout.drain_timeout.seconds)
    return {
        "serviceAccountName": labels.router_name(service.name),
        # It watches EndpointSlices with its token; its ServiceAccount mounts none by default.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        **sandbox.pull_secrets(settings.image_pull_secret),
        "securityContext": sandbox.pod_security_context(),
        "terminationGracePeriodSeconds": _PRE_STOP_SECONDS + drain_seconds + _STOP_MARGIN_SECONDS,
        "topologySpreadConstraints": topology_spread(service.name, labels.ROLE_ROUTER),
        "containers": [
            {
                "name": "router",
                "image": settings.router_image,
                "imagePullPolicy": settings.image_pull_policy,
                "command": router_command(service),
                "env": [sandbox.HOME_ENV, router_secret_env(service)],
                "ports": [
                    {"name": "http", "containerPort": labels.ROUTER_HTTP_PORT, "protocol": "TCP"},
                    {"name": "admin", "containerPort": labels.ROUTER_ADMIN_PORT, "protocol": "TCP"},
                ],
                "resources": _resources(router),
                "startupProbe": http_probe("/health", "admin", period_seconds=1, failure_threshold=60),
                "readinessProbe": http_probe("/ready", "admin", period_seconds=2, failure_threshold=2),
                "livenessProbe": liveness_probe("admin"),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "lifecycle": {"preStop": {"sleep": {"seconds": _PRE_STOP_SECONDS}}},
                "securityContext": sandbox.container_security_context(),
                "volumeMounts": [*mounts, sandbox.TMP_MOUNT],
            }
        ],
        "volumes": [*volumes, sandbox.TMP_VOLUME],
    }


def _resources(router: RouterSpec) -> dict[str, Any]:
    """CPU is not limited: a burst of requests may use what the node has to spare."""
    cpu, memory = router.resources.cpu.text, router.resources.memory.text
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


def _api_keys(router: RouterSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if router.api_keys_secret_ref is None:
        return [], []
    volume = {"name": "api-keys", "secret": {"secretName": router.api_keys_secret_ref.name}}
    return [volume], [{"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True}]
