"""Names of the gauges that tell of engines: every worker of a router sees the same ones, each for itself.

Of several workers the most counts, where all other series are added up.
"""

from enum import StrEnum


class FleetSeries(StrEnum):
    ENDPOINTS = "kvasir_router_endpoints"
    SERVICE_ENDPOINTS = "kvasir_router_service_endpoints"
    EJECTED_ENDPOINTS = "kvasir_router_ejected_endpoints"
    KV_BLOCKS = "kvasir_router_kv_blocks"
    KV_EVENT_LAG_SECONDS = "kvasir_router_kv_event_lag_seconds"
