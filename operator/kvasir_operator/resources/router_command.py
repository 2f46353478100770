"""The router's command line: `kvasir-router serve` with the manifest's fields as flags."""

from typing import Final

from kvasir_logging import LogFormat
from kvasir_operator.api import labels
from kvasir_operator.api.model import DisaggregationSpec, InferenceService, RouterProbes, RouterSpec, TenantLimits
from kvasir_operator.resources.engine_command import ANY_ADDRESS, log_flags
from kvasir_operator.resources.kv_events import router_kv_events_flags
from kvasir_operator.resources.services import router_peers_flags

# A mounted Secret: one file a tenant, with its keys one a line.
API_KEYS_FOLDER: Final = "/etc/kvasir/api-keys"
KV_TRANSFER_PORT_FLAG: Final = "--kv-transfer-port"
SHUTDOWN_DELAY_FLAG: Final = "--shutdown-delay"


def router_command(service: InferenceService, log_format: LogFormat = "text") -> list[str]:
    """Engines are found by the EndpointSlices of all of the service's roles and revisions."""
    router = service.spec.router
    name, *aliases = service.model_names
    return [
        "kvasir-router",
        "serve",
        *("--host", ANY_ADDRESS),
        *("--port", str(labels.ROUTER_HTTP_PORT)),
        *("--admin-port", str(labels.ROUTER_ADMIN_PORT)),
        *("--policy", router.policy),
        *("--model", name),
        *(text for alias in aliases for text in ("--model-alias", alias)),
        *("--endpoints-service", f"{service.namespace}/{service.name}:{labels.ENGINE_HTTP_PORT}"),
        *router_kv_events_flags(),
        *router_peers_flags(service),
        *_disaggregation(service.spec.disaggregation),
        *("--max-queue-size", str(router.max_queue_size)),
        *("--max-queue-wait", f"{router.max_queue_wait.seconds:g}"),
        *("--sse-keepalive-interval", f"{router.sse_keepalive_interval.seconds:g}"),
        *(SHUTDOWN_DELAY_FLAG, f"{service.spec.rollout.drain_delay.seconds:g}"),
        *("--shutdown-timeout", f"{service.spec.rollout.drain_timeout.seconds:g}"),
        *(("--api-keys-file", API_KEYS_FOLDER) if router.api_keys_secret_ref else ()),
        *_limits(router),
        *log_flags(log_format),
    ]


def _disaggregation(split: DisaggregationSpec | None) -> list[str]:
    if split is None:
        return []
    return [
        *(KV_TRANSFER_PORT_FLAG, str(labels.ENGINE_KV_TRANSFER_PORT)),
        *("--remote-prefill-min-tokens", str(split.remote_prefill_min_tokens)),
    ]


def _limits(router: RouterSpec) -> list[str]:
    tenants, probes = router.tenant_limits or TenantLimits(), router.probes or RouterProbes()
    flags = {
        "--tenant-tokens-per-minute": tenants.tokens_per_minute,
        "--tenant-max-in-flight": tenants.max_in_flight,
        "--probe-timeout": probes.timeout_seconds,
        "--probe-failures": probes.failure_threshold,
        "--hung-after": probes.hung_after_seconds,
    }
    return [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
