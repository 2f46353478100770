"""Flags of an engine on a host of its own, as a pod is, that exchanges KV with others and tells routers of its load."""

import json


def exchanging(host: str, events_port: int, replay_port: int, **connector: object) -> tuple[str, ...]:
    """`connector`: what else is said of its connector, `revision` for one."""
    extra = {"side_channel_host": host, "side_channel_port": 0, **connector}
    transfer = {"kv_connector": "NixlConnector", "kv_connector_extra_config": extra}
    published = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://{host}:{events_port}",
        "replay_endpoint": f"tcp://{host}:{replay_port}",
        "load_hz": 20,
    }
    config = ("--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(published))
    return ("--host", host, *config)
