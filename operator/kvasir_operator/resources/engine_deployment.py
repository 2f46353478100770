"""The Deployment of one engine role and revision: pods that hold the model and compute."""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.engine_command import engine_command
from kvasir_operator.resources.engine_resources import engine_resources, resource_claims, shared_memory
from kvasir_operator.resources.kv_events import kv_events_ports
from kvasir_operator.resources.kv_transfer import kv_transfer_env, kv_transfer_ports
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.model_loader import model_loaders
from kvasir_operator.resources.model_volume import ModelVolume, draft_model_volume, model_volume
from kvasir_operator.resources.parallel_ranks import rank_env, rank_ports
from kvasir_operator.resources.pod_overrides import (
    container_env,
    container_ports,
    file_volumes,
    pod_metadata,
    scheduling,
)
from kvasir_operator.resources.probes import http_probe, liveness_probe
from kvasir_operator.resources.service_accounts import engine_service_account_name
from kvasir_operator.settings import OperatorSettings

# Between the engine's own drain timeout and the kubelet's SIGKILL, to close sockets and free the device.
_STOP_MARGIN_SECONDS: Final = 15
# Two hours: the largest checkpoints from slow storage. A start that fails ends its process and is restarted at once.
_STARTUP_CHECKS: Final = 3600
_STARTUP_PERIOD_SECONDS: Final = 2


def engine_deployment(
    service: InferenceService, role: EngineRole, revision: str, replicas: int, settings: OperatorSettings
) -> dict[str, Any]:
    """`replicas`: of this revision alone."""
    rollout = service.spec.rollout
    revision_label = {labels.REVISION_LABEL: revision}
    name = labels.workload_name(service.name, role.name, revision)
    template = engine_pod_template(service, role, settings)
    template["metadata"]["labels"] |= revision_label
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, name, role.name, revision_label),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels.revision_selector(service.name, role.name, revision)},
            # A revision's template stays as it is: this is for one that somebody edited, and is put back.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
            },
            "progressDeadlineSeconds": _STARTUP_CHECKS * _STARTUP_PERIOD_SECONDS,
            "revisionHistoryLimit": 0,
            "template": template,
        },
    }


def engine_pod_template(service: InferenceService, role: EngineRole, settings: OperatorSettings) -> dict[str, Any]:
    """Everything that shapes the role's pods, and nothing else: what a revision is made from, so without its label."""
    model = model_volume(service.spec.model)
    draft = draft_model_volume(role.engine.speculative, service.spec.model.cache)
    loaders = model_loaders(service, role, settings, model, draft)
    volumes, mounts = _volumes_and_mounts(role, [model] if draft is None else [model, draft])
    spec = {
        "serviceAccountName": engine_service_account_name(service, role),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": sandbox.pod_security_context(role.pod.security_context),
        "terminationGracePeriodSeconds": int(service.spec.rollout.drain_timeout.seconds) + _STOP_MARGIN_SECONDS,
        **({"initContainers": loaders} if loaders else {}),
        "containers": [
            {
                "name": "engine",
                "image": role.pod.image or settings.runtime_image,
                "imagePullPolicy": settings.image_pull_policy,
                "command": engine_command(
                    service, role, model.location, None if draft is None else draft.location, settings.log_format
                ),
                "env": container_env(service, role, settings, [*rank_env(role), *kv_transfer_env(role)]),
                "ports": container_ports(_ports(role)),
                "resources": engine_resources(role),
                "startupProbe": http_probe("/ready", "http", _STARTUP_PERIOD_SECONDS, _STARTUP_CHECKS),
                "readinessProbe": http_probe("/ready", "http", period_seconds=2, failure_threshold=2),
                "livenessProbe": liveness_probe("http"),
                # The end of the log of an engine that ends with an error goes into the status (containers.py).
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": sandbox.container_security_context(role.pod.security_context),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
        **({"resourceClaims": resource_claims(role)} if role.resources.claims else {}),
        **scheduling(service, role, settings),
    }
    return {"metadata": pod_metadata(service, role), "spec": spec}


def _ports(role: EngineRole) -> dict[str, int]:
    http = {"http": labels.ENGINE_HTTP_PORT}
    return http | kv_events_ports(role.parallelism.data) | rank_ports(role) | kv_transfer_ports(role)


def _volumes_and_mounts(
    role: EngineRole, models: list[ModelVolume]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    memory_volumes, memory_mounts = shared_memory(role)
    files, file_mounts = file_volumes(role.pod)
    shared = {model.volume["name"]: model for model in models}.values()  # both may lie in the one cache
    volumes = [*(model.volume for model in shared), sandbox.TMP_VOLUME, *memory_volumes, *files]
    mounts = [*(model.mount for model in shared), sandbox.TMP_MOUNT, *memory_mounts, *file_mounts]
    return volumes, mounts
