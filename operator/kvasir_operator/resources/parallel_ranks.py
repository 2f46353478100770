"""The ranks of one replica: flags of its engines, and how the pods of a group find the one that leads them.

A group's pods have one template, so each learns its node's rank and its group from its own labels. Kubernetes puts
`$(NAME)` of the environment into the command.
"""

from collections.abc import Sequence
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole

MASTER_ADDRESS_FLAG: Final = "--master-addr"
MASTER_PORT_FLAG: Final = "--master-port"
_NODE_RANK_ENV: Final = "KVASIR_NODE_RANK"
_GROUP_ENV: Final = "KVASIR_GROUP"


def parallel_flags(service: InferenceService, role: EngineRole) -> list[str]:
    """Only degrees above 1: an engine of one rank starts as ever."""
    degrees = {
        "--tensor-parallel-size": role.parallelism.tensor,
        "--pipeline-parallel-size": role.parallelism.pipeline,
        "--data-parallel-size": role.parallelism.data,
    }
    flags = [text for flag, degree in degrees.items() if degree > 1 for text in (flag, str(degree))]
    expert = ["--enable-expert-parallel"] if role.parallelism.expert else []
    return [*flags, *expert, *(_node_flags(service, role) if role.is_grouped else [])]


def with_master_address(command: Sequence[str], address: str) -> list[str]:
    """`command` of a group's pod with another address of the one that leads."""
    index = list(command).index(MASTER_ADDRESS_FLAG) + 1
    return [*command[:index], address, *command[index + 1 :]]


def rank_env(role: EngineRole) -> list[dict[str, Any]]:
    """Variables of a group's pods; none for a pod that is a replica by itself."""
    if not role.is_grouped:
        return []
    return [label_env(_NODE_RANK_ENV, labels.RANK_LABEL), label_env(_GROUP_ENV, labels.GROUP_LABEL)]


def rank_ports(role: EngineRole) -> dict[str, int]:
    return {"rendezvous": labels.ENGINE_RENDEZVOUS_PORT} if role.is_grouped else {}


def label_env(name: str, label: str) -> dict[str, Any]:
    """A variable with the value of one of the pod's own labels."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def _node_flags(service: InferenceService, role: EngineRole) -> list[str]:
    rendezvous = labels.rendezvous_name(service.name, role.name)
    return [
        *("--nnodes", str(role.num_nodes)),
        *("--node-rank", f"$({_NODE_RANK_ENV})"),
        *(MASTER_ADDRESS_FLAG, f"$({_GROUP_ENV})-0.{rendezvous}.{service.namespace}.svc"),
        *(MASTER_PORT_FLAG, str(labels.ENGINE_RENDEZVOUS_PORT)),
    ]
