"""The router's command line: `kvasir-router serve` with the manifest's fields as flags."""

from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService

# A folder with one file a key, its tenant inside: what a Secret looks like when it is mounted.
API_KEYS_FOLDER: Final = "/etc/kvasir/api-keys"
DEFAULT_POLICY: Final = "finishTime"
# What the router of this release implements; desired/unsupported.py names the rest.
SUPPORTED_POLICIES: Final = (DEFAULT_POLICY, "roundRobin")


def router_command(service: InferenceService) -> list[str]:
    """`--model` once a name, the model's own first; engines are found by their Service's EndpointSlices."""
    router = service.spec.router
    engines = f"{service.namespace}/{labels.engine_name(service.name)}:{labels.ENGINE_HTTP_PORT}"
    return [
        "kvasir-router",
        "serve",
        *("--host", "0.0.0.0"),
        *("--port", str(labels.ROUTER_HTTP_PORT)),
        *("--admin-port", str(labels.ROUTER_ADMIN_PORT)),
        *("--policy", router.policy if router.policy in SUPPORTED_POLICIES else DEFAULT_POLICY),
        *(text for name in service.model_names for text in ("--model", name)),
        *("--endpoints-service", engines),
        *("--max-queue-size", str(router.max_queue_size)),
        *("--max-queue-wait", f"{router.max_queue_wait.seconds:g}"),
        *("--shutdown-timeout", f"{service.spec.rollout.drain_timeout.seconds:g}"),
        *(("--api-keys-file", API_KEYS_FOLDER) if router.api_keys_secret_ref else ()),
    ]
