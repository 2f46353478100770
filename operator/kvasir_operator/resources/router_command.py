"""The router's command line: `kvasir-router serve` with the manifest's fields as flags."""

from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.engine_command import ANY_ADDRESS

# A mounted Secret: one file a tenant, with its keys one a line.
API_KEYS_FOLDER: Final = "/etc/kvasir/api-keys"
DEFAULT_POLICY: Final = "finishTime"
# What the router of this release implements; desired/unsupported.py names the rest.
SUPPORTED_POLICIES: Final = (DEFAULT_POLICY, "roundRobin")


def router_command(service: InferenceService) -> list[str]:
    """Engines are found by the EndpointSlices of all of the service's roles and revisions."""
    router = service.spec.router
    name, *aliases = service.model_names
    return [
        "kvasir-router",
        "serve",
        *("--host", ANY_ADDRESS),
        *("--port", str(labels.ROUTER_HTTP_PORT)),
        *("--admin-port", str(labels.ROUTER_ADMIN_PORT)),
        *("--policy", router.policy if router.policy in SUPPORTED_POLICIES else DEFAULT_POLICY),
        *("--model", name),
        *(text for alias in aliases for text in ("--model-alias", alias)),
        *("--endpoints-service", f"{service.namespace}/{service.name}:{labels.ENGINE_HTTP_PORT}"),
        *("--max-queue-size", str(router.max_queue_size)),
        *("--max-queue-wait", f"{router.max_queue_wait.seconds:g}"),
        *("--shutdown-timeout", f"{service.spec.rollout.drain_timeout.seconds:g}"),
        *(("--api-keys-file", API_KEYS_FOLDER) if router.api_keys_secret_ref else ()),
    ]
