"""How prefill and decode pods of a service exchange KV blocks: the engine's connector, its environment and port.

Engines of different revisions refuse one another's blocks: each tells its own revision, which it reads from its label,
since the revision is made from the template that this is part of.
"""

import json
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.parallel_ranks import label_env

KV_TRANSFER_FLAG: Final = "--kv-transfer-config"
_POD_IP_ENV: Final = "POD_IP"
_REVISION_ENV: Final = "KVASIR_REVISION"
_KV_ROLES: Final = {labels.ROLE_PREFILL: "kv_producer", labels.ROLE_DECODE: "kv_consumer"}
# How long prefill keeps blocks that nobody has fetched yet or asked to be kept.
_LEASE_SECONDS: Final = 30


def kv_transfer_flags(role: EngineRole) -> list[str]:
    """None for a role that computes prompts and answers alike."""
    return [KV_TRANSFER_FLAG, json.dumps(_config(_KV_ROLES[role.name]))] if role.name in _KV_ROLES else []


def kv_transfer_env(role: EngineRole) -> list[dict[str, Any]]:
    if role.name not in _KV_ROLES:
        return []
    address = {"name": _POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, label_env(_REVISION_ENV, labels.REVISION_LABEL)]


def kv_transfer_ports(role: EngineRole) -> list[dict[str, Any]]:
    """The side channel's; blocks themselves travel on ports of the transport's choice."""
    if role.name not in _KV_ROLES:
        return []
    return [{"name": "kv-transfer", "containerPort": labels.ENGINE_KV_TRANSFER_PORT, "protocol": "TCP"}]


def _config(kv_role: str) -> dict[str, Any]:
    """A transfer that fails costs a prefill on the decode side, and no request."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "side_channel_host": f"$({_POD_IP_ENV})",
            "side_channel_port": labels.ENGINE_KV_TRANSFER_PORT,
            "revision": f"$({_REVISION_ENV})",
            "checksums": True,
            "lease_seconds": _LEASE_SECONDS,
        },
    }
