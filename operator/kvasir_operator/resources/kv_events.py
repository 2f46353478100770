"""KV events and load, which engines publish over ZMQ and routers follow.

An engine's data-parallel rank r publishes and replays on the ports that are r higher. Those of rank 0 are the same for
all services, since one gateway follows them all, and lie further apart than an engine can have ranks.
"""

import json
from typing import Any, Final

from kvasir_operator.api import labels

KV_EVENTS_FLAG: Final = "--kv-events-config"
KV_EVENTS_PORTS_FLAG: Final = "--kv-events"
# Load reports a second, most: what a router needs to place as well as one that sees every request.
LOAD_HZ: Final = 20
EVENTS_PORT_NAME: Final = "kv-events"
REPLAY_PORT_NAME: Final = "kv-replay"


def engine_kv_events_flags() -> list[str]:
    return [KV_EVENTS_FLAG, json.dumps(_config())]


def router_kv_events_flags() -> list[str]:
    """Rank 0's ports; from its load reports a router learns how many ranks follow."""
    return [KV_EVENTS_PORTS_FLAG, f"{labels.ENGINE_KV_EVENTS_PORT}:{labels.ENGINE_KV_REPLAY_PORT}"]


def kv_events_ports(num_ranks: int) -> dict[str, int]:
    """Of all data-parallel ranks of an engine, by name."""
    bases = {EVENTS_PORT_NAME: labels.ENGINE_KV_EVENTS_PORT, REPLAY_PORT_NAME: labels.ENGINE_KV_REPLAY_PORT}
    return {
        f"{name}-{rank}" if rank else name: base + rank for name, base in bases.items() for rank in range(num_ranks)
    }


def _config() -> dict[str, Any]:
    """On every address, IPv6 and IPv4, like the API."""
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{labels.ENGINE_KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{labels.ENGINE_KV_REPLAY_PORT}",
        "load_hz": LOAD_HZ,
    }
