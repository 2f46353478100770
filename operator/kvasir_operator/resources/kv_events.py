"""KV events and load, which engines publish over ZMQ and routers follow.

The data-parallel ranks of an engine take a pair of ports each, and these two have no room between them: where a service
has such engines nothing is published, and its routers go by what they have sent where.
"""

import json
from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService

KV_EVENTS_FLAG: Final = "--kv-events-config"
KV_EVENTS_PORTS_FLAG: Final = "--kv-events"
# Load reports a second, most: what a router needs to place as well as one that sees every request.
LOAD_HZ: Final = 20


def engine_kv_events_flags(service: InferenceService) -> list[str]:
    return [KV_EVENTS_FLAG, json.dumps(_config())] if _are_published(service) else []


def router_kv_events_flags(service: InferenceService) -> list[str]:
    ports = f"{labels.ENGINE_KV_EVENTS_PORT}:{labels.ENGINE_KV_REPLAY_PORT}"
    return [KV_EVENTS_PORTS_FLAG, ports] if _are_published(service) else []


def _are_published(service: InferenceService) -> bool:
    split = service.spec.disaggregation
    roles = (service.spec,) if split is None else (split.prefill, split.decode)
    return all(role.parallelism.data == 1 for role in roles)


def _config() -> dict[str, Any]:
    """On every address, IPv6 and IPv4, like the API."""
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{labels.ENGINE_KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{labels.ENGINE_KV_REPLAY_PORT}",
        "load_hz": LOAD_HZ,
    }
