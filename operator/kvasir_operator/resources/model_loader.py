"""The init containers that download models into the cache, before the engine starts: one a downloaded source.

Each replica has them, and where replicas share a cache the first one fills it while the others wait for its lock. They
alone have the environment of `model.secretRef`. How far one has come it says on the engine's own port, which nobody
uses yet; why it failed is the end of its log (observe/model_loader.py reads both). Why no Job: docs/decisions/0031.
"""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService, ModelSpec
from kvasir_operator.api.source import ModelSource
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.engine_command import ANY_ADDRESS, log_flags
from kvasir_operator.resources.engine_resources import loader_resources
from kvasir_operator.resources.model_volume import ModelVolume
from kvasir_operator.resources.pod_overrides import file_volumes, merged_env
from kvasir_operator.settings import OperatorSettings

# The hub is asked for the model and for nothing else.
_QUIET_ENV: Final[dict[str, Any]] = {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"}


def model_loaders(
    service: InferenceService,
    role: EngineRole,
    settings: OperatorSettings,
    model: ModelVolume,
    draft: ModelVolume | None,
) -> list[dict[str, Any]]:
    """`model` and `draft` are where the engine will look for them. None where volumes hold what it needs."""
    spec, speculative = service.spec.model, role.engine.speculative
    loaders = []
    if spec.source.is_downloaded:
        loaders.append(_loader(labels.MODEL_LOADER, spec.source, model, spec, role, settings))
    draft_source = None if speculative is None else speculative.model
    if draft is not None and draft_source is not None and draft_source.is_downloaded:
        loaders.append(_loader(labels.DRAFT_MODEL_LOADER, draft_source, draft, spec, role, settings))
    return loaders


def _loader(
    name: str, source: ModelSource, volume: ModelVolume, spec: ModelSpec, role: EngineRole, settings: OperatorSettings
) -> dict[str, Any]:
    resources = loader_resources(role)
    return {
        "name": name,
        "image": role.pod.image or settings.runtime_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": [*_command(source, volume.location, spec), *log_flags(settings.log_format)],
        # The pod's own besides: proxies, and certificates, whose files are mounted too.
        "env": merged_env(role.pod, sandbox.HOME_ENV, _QUIET_ENV),
        **({} if spec.secret_ref is None else {"envFrom": [{"secretRef": {"name": spec.secret_ref.name}}]}),
        **({"resources": resources} if resources else {}),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": sandbox.container_security_context(role.pod.security_context),
        "volumeMounts": [
            {key: value for key, value in volume.mount.items() if key != "readOnly"},
            sandbox.TMP_MOUNT,
            *file_volumes(role.pod)[1],
        ],
    }


def _command(source: ModelSource, location: str, spec: ModelSpec) -> list[str]:
    size_limit = None if spec.cache is None else spec.cache.size_limit
    return [
        *("kvasir-runtime", "fetch", source.text, location),
        *("--host", ANY_ADDRESS, "--port", str(labels.ENGINE_HTTP_PORT)),
        *(() if size_limit is None else ("--size-limit", str(int(size_limit.amount)))),
    ]
