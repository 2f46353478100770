"""A replica of several pods where LeaderWorkerSet is installed: one of one group, made of a leader and its workers.

Its template is that of a StatefulSet's group but for the leader's address, so both belong to one revision. It restarts
nothing by itself: a group is restarted as a whole, by groups/restart.py, which knows a budget.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.kube.kinds import LEADER_WORKER_SET
from kvasir_operator.resources.engine_group import group_labels, group_template
from kvasir_operator.resources.metadata import metadata
from kvasir_operator.resources.parallel_ranks import with_master_address
from kvasir_operator.settings import OperatorSettings

# A variable of each container: the leader's name in DNS, which is there before it is ready.
_LEADER_ADDRESS: Final = "$(LWS_LEADER_ADDRESS)"


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
