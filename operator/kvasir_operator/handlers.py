"""kopf as event source only: what happens to a service puts its key into our own queue. Children: child_watch.py.

Only startup, login and event handlers: nothing here writes annotations, finalizers or Events to the cluster.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import GROUP
from kvasir_operator.kinds import INFERENCE_SERVICE, ServiceKey
from kvasir_operator.kube import PAGE_SIZE, REQUEST_TIMEOUT_SECONDS

# A watch is opened anew this often even when it seems alive. Whole seconds: the API server refuses "240.0".
WATCH_SECONDS = 240


def kopf_settings() -> kopf.OperatorSettings:
    """Quiet, bounded in time, and in need of no rights but those on what is watched."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.client_timeout = WATCH_SECONDS + REQUEST_TIMEOUT_SECONDS
    settings.watching.connect_timeout = REQUEST_TIMEOUT_SECONDS
    settings.watching.chunk_size = PAGE_SIZE
    # No watch of namespaces and CRDs, which a Role cannot allow: run.py requires our CRD at the start.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    # kopf would kill the process on its own some time after a stop; run.py bounds the stop itself.
    settings.process.ultimate_exiting_timeout = None
    return settings


def kopf_registry(
    load_configuration: Callable[[], Awaitable[Configuration]], wake: Callable[[ServiceKey], None]
) -> kopf.OperatorRegistry:
    """`wake` is called with every service that is there at the start, is made, changes its spec, or goes."""
    registry = kopf.OperatorRegistry()
    generations: dict[ServiceKey, tuple[str, int, bool]] = {}

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        # Again after each 401: a pod's token is renewed on disk.
        return await kopf_credentials(await load_configuration())

    @kopf.on.event(INFERENCE_SERVICE.group, INFERENCE_SERVICE.version, INFERENCE_SERVICE.plural, registry=registry)
    async def service_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        metadata = body["metadata"]
        key = ServiceKey(metadata["namespace"], metadata["name"])
        generation = (metadata["uid"], metadata["generation"], "deletionTimestamp" in metadata)
        if generations.get(key) != generation or type == "DELETED":  # else its status changed: mostly our own doing
            generations[key] = generation
            wake(key)
        if type == "DELETED":
            del generations[key]

    return registry


async def kopf_credentials(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's address and credentials, for kopf's own client."""
    authorization = await configuration.get_api_key_with_prefix("BearerToken") or ""
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme="Bearer" if authorization else None,
        token=authorization.partition(" ")[2] or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
