"""A replica of several pods: a StatefulSet, each of whose pods computes a stage of the pipeline, or a part of one.

All its pods are made at once, in no order, since none is of use without the others. A changed template restarts nothing
(OnDelete): a group is restarted as a whole, by groups/restart.py.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.kube.kinds import LEADER_WORKER_SET
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.parallel_ranks import with_master_address
from kvasir_operator.settings import OperatorSettings

_HOST_NAME: Final = "kubernetes.io/hostname"
# The most that a preference may weigh: against avoiding a node that breaks groups, no other counts for more.
_AVOIDANCE_WEIGHT: Final = 100
# A variable of each container: the leader's name in DNS, which is there before it is ready.
_LEADER_ADDRESS: Final = "$(LWS_LEADER_ADDRESS)"


def engine_group(
    service: InferenceService,
    role: EngineRole,
    revision: str,
    index: int,
    settings: OperatorSettings,
    avoided_nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """`index` tells a revision's groups apart. `avoided_nodes` are taken only where no other node has room."""
    name = labels.group_name(service.name, role.name, revision, index)
    own_labels = group_labels(name, revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            **metadata(service, name, role.name, own_labels),
            "annotations": {labels.GROUP_SIZE: str(role.num_nodes)},
        },
        "spec": {
            "replicas": role.num_nodes,
            "serviceName": labels.rendezvous_name(service.name, role.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {**labels.role_selector(service.name, role.name), **own_labels}},
            "template": group_template(service, role, own_labels, settings, avoided_nodes),
        },
    }


def group_labels(name: str, revision: str) -> dict[str, str]:
    """Of a group's object and its pods, beside those of its role."""
    return {labels.REVISION_LABEL: revision, labels.GROUP_LABEL: name}


def group_template(
    service: InferenceService,
    role: EngineRole,
    own_labels: dict[str, str],
    settings: OperatorSettings,
    avoided_nodes: Sequence[str],
) -> dict[str, Any]:
    """`own_labels` as of `group_labels`."""
    template = engine_pod_template(service, role, settings)
    template["metadata"]["labels"] |= own_labels
    if avoided_nodes:
        template["spec"]["affinity"] = _avoiding(template["spec"].get("affinity", {}), avoided_nodes)
    return template


def rendezvous_service(service: InferenceService, role: EngineRole) -> dict[str, Any] | None:
    """Names the pods of all of a role's groups in DNS, before they are ready; None for a role without groups.

    Its EndpointSlices show unready pods, and followers, as ready: by its own role label routers pass them over.
    """
    if not role.is_grouped:
        return None
    described = metadata(service, labels.rendezvous_name(service.name, role.name), labels.ROLE_RENDEZVOUS)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": described,
        "spec": {
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "publishNotReadyAddresses": True,
            "selector": labels.role_selector(service.name, role.name),
            "ports": [
                {
                    "name": "rendezvous",
                    "port": labels.ENGINE_RENDEZVOUS_PORT,
                    "targetPort": "rendezvous",
                    "protocol": "TCP",
                }
            ],
        },
    }


def _avoiding(affinity: dict[str, Any], nodes: Sequence[str]) -> dict[str, Any]:
    """The manifest's own affinity with a preference for other nodes."""
    node_affinity = affinity.get("nodeAffinity", {})
    others = {"matchExpressions": [{"key": _HOST_NAME, "operator": "NotIn", "values": list(nodes)}]}
    preferred = [
        *node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution", []),
        {"weight": _AVOIDANCE_WEIGHT, "preference": others},
    ]
    return {
        **affinity,
        "nodeAffinity": {**node_affinity, "preferredDuringSchedulingIgnoredDuringExecution": preferred},
    }


def leader_worker_set(
    service: InferenceService,
    role: EngineRole,
    revision: str,
    index: int,
    settings: OperatorSettings,
    avoided_nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """As `engine_group`. Other `avoided_nodes` make its pods anew, so they change with a restart only."""
    name = labels.leader_worker_set_name(service.name, role.name, revision, index)
    own_labels = group_labels(name, revision)
    template = group_template(service, role, own_labels, settings, avoided_nodes)
    [container] = template["spec"]["containers"]
    container["command"] = with_master_address(container["command"], _LEADER_ADDRESS)
    return {
        "apiVersion": LEADER_WORKER_SET.api_version,
        "kind": LEADER_WORKER_SET.kind,
        "metadata": metadata(service, name, role.name, own_labels),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {"size": role.num_nodes, "restartPolicy": "None", "workerTemplate": template},
        },
    }
