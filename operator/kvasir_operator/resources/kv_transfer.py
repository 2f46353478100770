"""How pods of a service exchange KV blocks: the engine's connector, its environment and port.

Prefill pods give and decode pods take. Where the manifest says so, pods of each role exchange KV with one another.

Engines of different revisions refuse one another's blocks: each tells its own revision, which it reads from its label,
since the revision is made from the template that this is part of.
"""

import json
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.parallel_ranks import label_env

KV_TRANSFER_FLAG: Final = "--kv-transfer-config"
KV_TRANSFER_PORT_NAME: Final = "kv-transfer"
_POD_IP_ENV: Final = "POD_IP"
_REVISION_ENV: Final = "KVASIR_REVISION"
_KV_ROLES: Final = {labels.ROLE_PREFILL: "kv_producer", labels.ROLE_DECODE: "kv_consumer"}
# How long a pod keeps blocks that nobody has fetched yet or asked to be kept.
_LEASE_SECONDS: Final = 30


def kv_transfer_flags(role: EngineRole) -> list[str]:
    kv_role = _kv_role(role)
    return [] if kv_role is None else [KV_TRANSFER_FLAG, json.dumps(_config(kv_role))]


def kv_transfer_env(role: EngineRole) -> list[dict[str, Any]]:
    if _kv_role(role) is None:
        return []
    address = {"name": _POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, label_env(_REVISION_ENV, labels.REVISION_LABEL)]


def kv_transfer_ports(role: EngineRole) -> dict[str, int]:
    """The side channel's of each data-parallel rank; blocks themselves travel on ports of the transport's choice."""
    if _kv_role(role) is None:
        return {}
    base, name = labels.ENGINE_KV_TRANSFER_PORT, KV_TRANSFER_PORT_NAME
    return {f"{name}-{rank}" if rank else name: base + rank for rank in range(role.parallelism.data)}


def _kv_role(role: EngineRole) -> str | None:
    """None: its pods exchange no KV."""
    return "kv_both" if role.engine.kv_transfer else _KV_ROLES.get(role.name)


def _config(kv_role: str) -> dict[str, Any]:
    """A transfer that fails costs a prefill where the blocks were to come, and no request."""
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
