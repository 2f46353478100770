"""A replica of several pods, each of which computes a stage of the pipeline, or a part of one: a StatefulSet, or where
LeaderWorkerSet is installed one of one group, made of a leader and its workers.

Pods of a StatefulSet are all made at once, in no order, since none is of use without the others. Both have one template
but for the leader's address, so they belong to one revision. Neither restarts anything by itself: a group is restarted
as a whole, by groups/restart.py, which knows a budget.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET
from kvasir_operator.resources.engine_deployment import engine_pod_template
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.parallel_ranks import with_master_address
from kvasir_operator.settings import OperatorSettings

_HOST_NAME: Final = "kubernetes.io/hostname"
# The most that a preference may weigh: against avoiding a node that breaks groups, no other counts for more.
_AVOIDANCE_WEIGHT: Final = 100
# What others know a group by, where the manifest's pods are theirs to place: Kueue by a label of its queue, Volcano by
# schedulerName. Of a LeaderWorkerSet both do the rest themselves.
_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_VOLCANO: Final = "volcano"
# A variable of each container: the leader's name in DNS, which is there before it is ready.
_LEADER_ADDRESS: Final = "$(LWS_LEADER_ADDRESS)"
# What an object of a group is called, by its kind.
GROUP_NAMES: Final = {STATEFUL_SET: labels.group_name, LEADER_WORKER_SET: labels.leader_worker_set_name}


def engine_group(
    service: InferenceService, role: EngineRole, revision: str, group: WantedGroup, settings: OperatorSettings
) -> dict[str, Any]:
    """Its `avoided_nodes` are taken only where no other node has room.

    Others make the pods of a LeaderWorkerSet anew, so there they change with a restart only.
    """
    name = GROUP_NAMES[group.kind](service.name, role.name, revision, group.index)
    own_labels = {labels.REVISION_LABEL: revision, labels.GROUP_LABEL: name}
    template = engine_pod_template(service, role, settings)
    template["metadata"]["labels"] |= own_labels
    if group.avoided_nodes:
        template["spec"]["affinity"] = _avoiding(template["spec"].get("affinity", {}), group.avoided_nodes)
    make = _leader_worker_set if group.kind == LEADER_WORKER_SET else _stateful_set
    return make(service, role, name, own_labels, template)


def _stateful_set(
    service: InferenceService, role: EngineRole, name: str, own_labels: dict[str, str], template: dict[str, Any]
) -> dict[str, Any]:
    if _QUEUE in role.pod.labels:
        _add_to_queue(template["metadata"], name, role.num_nodes)
    return {
        "apiVersion": STATEFUL_SET.api_version,
        "kind": STATEFUL_SET.kind,
        "metadata": {
            **metadata(service, name, role.name, own_labels),
            "annotations": {labels.GROUP_SIZE: str(role.num_nodes), **_min_member(role)},
        },
        "spec": {
            "replicas": role.num_nodes,
            "serviceName": labels.rendezvous_name(service.name, role.name),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {**labels.role_selector(service.name, role.name), **own_labels}},
            "template": template,
        },
    }


def _leader_worker_set(
    service: InferenceService, role: EngineRole, name: str, own_labels: dict[str, str], template: dict[str, Any]
) -> dict[str, Any]:
    [container] = template["spec"]["containers"]
    container["command"] = with_master_address(container["command"], _LEADER_ADDRESS)
    return {
        "apiVersion": LEADER_WORKER_SET.api_version,
        "kind": LEADER_WORKER_SET.kind,
        "metadata": metadata(service, name, role.name, {**own_labels, **_queue_label(role)}),
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {"size": role.num_nodes, "restartPolicy": "None", "workerTemplate": template},
        },
    }


def _queue_label(role: EngineRole) -> dict[str, str]:
    return {key: value for key, value in role.pod.labels.items() if key == _QUEUE}


def _add_to_queue(pod_metadata: dict[str, Any], group: str, size: int) -> None:
    """All of a group's pods are admitted at once, and each may be made anew."""
    pod_metadata["labels"]["kueue.x-k8s.io/pod-group-name"] = group
    size_and_kind = {"kueue.x-k8s.io/pod-group-total-count": str(size), "kueue.x-k8s.io/pod-group-serving": "true"}
    pod_metadata["annotations"] = {**pod_metadata.get("annotations", {}), **size_and_kind}


def _min_member(role: EngineRole) -> dict[str, str]:
    is_volcanos = role.pod.scheduler_name == _VOLCANO
    return {"scheduling.volcano.sh/group-min-member": str(role.num_nodes)} if is_volcanos else {}


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
