"""The manifest's `pod` group, merged into the engine pod: where it may run, and its environment."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService, Toleration
from kvasir_operator.api.serialize import as_manifest
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.router_secret import router_secret_env
from kvasir_operator.resources.topology_spread import topology_spread


def scheduling_overrides(service: InferenceService) -> dict[str, Any]:
    """Keys of the pod spec that say where the pod may run; absent ones are left out."""
    pod = service.spec.pod
    spread = topology_spread(service.name, labels.ROLE_SERVE) if pod.topology_spread == "auto" else []
    overrides = {
        "nodeSelector": dict(pod.node_selector),
        "tolerations": [_toleration(toleration) for toleration in pod.tolerations],
        "affinity": dict(pod.affinity),
        "topologySpreadConstraints": spread,
        "priorityClassName": pod.priority_class_name,
    }
    return {key: value for key, value in overrides.items() if value}


def engine_env(service: InferenceService) -> list[dict[str, Any]]:
    """Ours first; the manifest's value wins where both name a variable."""
    ours = {variable["name"]: variable for variable in (sandbox.HOME_ENV, router_secret_env(service))}
    theirs = {variable.name: as_manifest(variable) for variable in service.spec.pod.env}
    return list({**ours, **theirs}.values())


def _toleration(toleration: Toleration) -> dict[str, Any]:
    return {"operator": toleration.operator, **as_manifest(toleration)}
