"""The engine's Deployment: pods that hold the model and compute."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.engine_command import engine_command
from kvasir_operator.resources.engine_resources import engine_resources, shared_memory
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.model_volume import draft_model_volume, model_volume
from kvasir_operator.resources.pod_overrides import engine_env, scheduling_overrides
from kvasir_operator.resources.probes import http_probe, liveness_probe
from kvasir_operator.resources.replicas import engine_replicas
from kvasir_operator.resources.service_accounts import engine_service_account_name
from kvasir_operator.settings import OperatorSettings

# Between the engine's own drain timeout and the kubelet's SIGKILL, to close sockets and free the device.
_STOP_MARGIN_SECONDS = 15
# Two hours: the largest checkpoints from slow storage. A start that fails ends its process and is restarted at once.
_STARTUP_CHECKS = 3600
_STARTUP_PERIOD_SECONDS = 2


def engine_deployment(service: InferenceService, settings: OperatorSettings, revision: str) -> dict[str, Any]:
    """`revision` labels the Deployment and its pods."""
    rollout = service.spec.rollout
    revision_label = {labels.REVISION_LABEL: revision}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, labels.engine_name(service.name), labels.ROLE_SERVE, revision_label),
        "spec": {
            "replicas": engine_replicas(service),
            "selector": {"matchLabels": labels.role_selector(service.name, labels.ROLE_SERVE)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "progressDeadlineSeconds": _STARTUP_CHECKS * _STARTUP_PERIOD_SECONDS,
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": _pod_metadata(service, revision_label),
                "spec": _pod_spec(service, settings),
            },
        },
    }


def _pod_metadata(service: InferenceService, revision_label: dict[str, str]) -> dict[str, Any]:
    pod = service.spec.pod
    own_labels = {**labels.role_labels(service.name, labels.ROLE_SERVE), **revision_label}
    own_labels |= labels.monitoring_labels(service.spec.monitoring.pod_monitor)
    result: dict[str, Any] = {"labels": {**pod.labels, **own_labels}}
    if pod.annotations:
        result["annotations"] = dict(pod.annotations)
    return result


def _pod_spec(service: InferenceService, settings: OperatorSettings) -> dict[str, Any]:
    model, draft = model_volume(service.spec.model.source), draft_model_volume(service.spec.engine.speculative)
    memory_volumes, memory_mounts = shared_memory(service.spec)
    files = [model] if draft is None else [model, draft]
    volumes = [*(f.volume for f in files if f.volume is not None), sandbox.TMP_VOLUME, *memory_volumes]
    mounts = [*(f.mount for f in files if f.mount is not None), sandbox.TMP_MOUNT, *memory_mounts]
    return {
        "serviceAccountName": engine_service_account_name(service),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **sandbox.pull_secrets(settings.image_pull_secret),
        "securityContext": sandbox.pod_security_context(),
        "terminationGracePeriodSeconds": int(service.spec.rollout.drain_timeout.seconds) + _STOP_MARGIN_SECONDS,
        "containers": [
            {
                "name": "engine",
                "image": service.spec.pod.image or settings.runtime_image,
                "imagePullPolicy": settings.image_pull_policy,
                "command": engine_command(service, model.location, None if draft is None else draft.location),
                "env": engine_env(service),
                "ports": [{"name": "http", "containerPort": labels.ENGINE_HTTP_PORT, "protocol": "TCP"}],
                "resources": engine_resources(service.spec),
                "startupProbe": http_probe("/ready", "http", _STARTUP_PERIOD_SECONDS, _STARTUP_CHECKS),
                "readinessProbe": http_probe("/ready", "http", period_seconds=2, failure_threshold=2),
                "livenessProbe": liveness_probe("http"),
                # The end of the log of an engine that ends with an error goes into the status (containers.py).
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": sandbox.container_security_context(),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
        **scheduling_overrides(service),
    }
