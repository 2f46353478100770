"""The router's Deployment: pods that take clients' requests and pick an engine for each."""

import math
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService, SecretRef
from kvasir_operator.desired.roles import RouterRole
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.pod_overrides import (
    container_env,
    container_ports,
    file_volumes,
    pod_metadata,
    scheduling,
)
from kvasir_operator.resources.probes import http_probe, liveness_probe
from kvasir_operator.resources.router_command import API_KEYS_FOLDER, router_command
from kvasir_operator.resources.service_accounts import router_service_account_name
from kvasir_operator.settings import OperatorSettings

_PORTS: Final = {
    "http": labels.ROUTER_HTTP_PORT,
    "admin": labels.ROUTER_ADMIN_PORT,
    "peers": labels.ROUTER_PEERS_PORT,
}
_STOP_MARGIN_SECONDS: Final = 15
_EVICTABLE: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"


def router_deployment(service: InferenceService, role: RouterRole, settings: OperatorSettings) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, labels.router_name(service.name), role.name),
        "spec": {
            "replicas": role.replicas,
            "selector": {"matchLabels": labels.role_selector(service.name, role.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "revisionHistoryLimit": 3,
            "template": {"metadata": _pod_metadata(service, role), "spec": _pod_spec(service, role, settings)},
        },
    }


def _pod_metadata(service: InferenceService, role: RouterRole) -> dict[str, Any]:
    """Nothing of worth is in its /tmp, for which a cluster autoscaler would keep the node."""
    metadata_ = pod_metadata(service, role)
    return {**metadata_, "annotations": {_EVICTABLE: sandbox.TMP_VOLUME["name"], **metadata_.get("annotations", {})}}


def _pod_spec(service: InferenceService, role: RouterRole, settings: OperatorSettings) -> dict[str, Any]:
    key_volumes, key_mounts = _api_keys(service.spec.router.api_keys_secret_ref)
    files, file_mounts = file_volumes(role.pod)
    rollout = service.spec.rollout
    drain_seconds = math.ceil(rollout.drain_delay.seconds + rollout.drain_timeout.seconds)
    return {
        "serviceAccountName": router_service_account_name(service, role),
        # It watches EndpointSlices with its token; its ServiceAccount mounts none by default.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": sandbox.pod_security_context(role.pod.security_context),
        "terminationGracePeriodSeconds": drain_seconds + _STOP_MARGIN_SECONDS,
        "containers": [
            {
                "name": "router",
                "image": role.pod.image or settings.router_image,
                "imagePullPolicy": settings.image_pull_policy,
                "command": router_command(service, settings.log_format),
                "env": container_env(service, role, settings),
                "ports": container_ports(_PORTS),
                "resources": _resources(role),
                "startupProbe": http_probe("/health", "admin", period_seconds=1, failure_threshold=60),
                "readinessProbe": http_probe("/ready", "admin", period_seconds=2, failure_threshold=2),
                "livenessProbe": liveness_probe("admin"),
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": sandbox.container_security_context(role.pod.security_context),
                "volumeMounts": [*key_mounts, sandbox.TMP_MOUNT, *file_mounts],
            }
        ],
        "volumes": [*key_volumes, sandbox.TMP_VOLUME, *files],
        **scheduling(service, role, settings),
    }


def _resources(role: RouterRole) -> dict[str, Any]:
    """CPU is limited only where that is asked for: a burst of requests may use what the node has to spare."""
    cpu, memory = role.cpu.text, role.memory.text
    cpu_limit = {} if role.cpu_limit is None else {"cpu": role.cpu_limit.text}
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory, **cpu_limit}}


def _api_keys(secret: SecretRef | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Mounted whole, not by subPath, which the kubelet would not bring up to date when the Secret changes."""
    if secret is None:
        return [], []
    volume = {"name": "api-keys", "secret": {"secretName": secret.name}}
    return [volume], [{"name": "api-keys", "mountPath": API_KEYS_FOLDER, "readOnly": True}]
