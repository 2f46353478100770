"""The manifest's `pod` group, merged into a role's pods: where they may run, their environment, labels and files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.fields import as_manifest
from kvasir_operator.api.model import InferenceService, PodSpec, PodVolume
from kvasir_operator.desired.roles import Role
from kvasir_operator.resources import sandbox
from kvasir_operator.resources.router_secret import router_secret_env
from kvasir_operator.settings import OperatorSettings

_ARCHITECTURE: Final = "kubernetes.io/arch"
_DEFAULT_ARCHITECTURE: Final = "amd64"


def pod_metadata(service: InferenceService, role: Role) -> dict[str, Any]:
    """Of the pod template; the manifest's labels cannot hide ours."""
    own_labels = labels.role_labels(service.name, role.name)
    result: dict[str, Any] = {"labels": {**role.pod.labels, **own_labels}}
    if role.pod.annotations:
        result["annotations"] = dict(role.pod.annotations)
    return result


def scheduling(service: InferenceService, role: Role, settings: OperatorSettings) -> dict[str, Any]:
    """Keys of the pod spec that say where the pod may run, and with what; absent ones are left out.

    Without pull secrets those of the pod's ServiceAccount hold.
    """
    pod = role.pod
    keys = {
        "nodeSelector": {**_architecture(settings.image_architecture), **pod.node_selector},
        "tolerations": [{"operator": each.operator, **as_manifest(each)} for each in pod.tolerations],
        "affinity": dict(pod.affinity),
        "topologySpreadConstraints": _topology_spread(service.name, role.name) if _is_spread(role) else [],
        "priorityClassName": pod.priority_class_name,
        "runtimeClassName": pod.runtime_class_name,
        "schedulerName": pod.scheduler_name,
        "imagePullSecrets": _pull_secrets(settings.image_pull_secret, pod),
    }
    return {key: value for key, value in keys.items() if value}


def container_ports(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def container_env(
    service: InferenceService, role: Role, settings: OperatorSettings, of_role: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Ours first, then those of the role."""
    return merged_env(role.pod, sandbox.HOME_ENV, router_secret_env(service, settings), *of_role)


def merged_env(pod: PodSpec, *ours: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifest's value wins where both name a variable."""
    theirs = {variable.name: as_manifest(variable) for variable in pod.env}
    return list({**{variable["name"]: variable for variable in ours}, **theirs}.values())


def file_volumes(pod: PodSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts of `pod.volumes`."""
    named = [(f"files-{index}", volume) for index, volume in enumerate(pod.volumes)]
    volumes = [{"name": name, **_volume_source(volume)} for name, volume in named]
    mounts = [{"name": name, "mountPath": volume.mount_path, "readOnly": True} for name, volume in named]
    return volumes, mounts


def _architecture(architectures: Sequence[str]) -> dict[str, str]:
    """Images of one architecture run nowhere else; those of several are taken to run on every node."""
    [first, *others] = architectures or (_DEFAULT_ARCHITECTURE,)
    return {} if others else {_ARCHITECTURE: first}


def _is_spread(role: Role) -> bool:
    """Pods of a group are better close to one another, so a role of groups is not pulled apart."""
    return role.pod.topology_spread != "none" and not role.is_grouped


def _topology_spread(service_name: str, role: str) -> list[dict[str, Any]]:
    """Over nodes, then zones, without keeping a pod waiting for it.

    Counted per pod template, so that a rollout's old pods do not push the new ones together.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels.role_selector(service_name, role)},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]


def _pull_secrets(of_installation: Iterable[str], pod: PodSpec) -> list[dict[str, str]]:
    names = dict.fromkeys((*of_installation, *(secret.name for secret in pod.image_pull_secrets)))
    return [{"name": name} for name in names]


def _volume_source(volume: PodVolume) -> dict[str, Any]:
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map.name}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret.name}}
    assert volume.claim is not None, "rules.py: exactly one of the three is set"
    return {"persistentVolumeClaim": {"claimName": volume.claim.name, "readOnly": True}}
