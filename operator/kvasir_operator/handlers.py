"""kopf as event source only: each event of a service or of a child puts the service's key into our own queue.

Only startup, login and event handlers: nothing here writes annotations, finalizers or Events to the cluster.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import GROUP, SERVICE_LABEL
from kvasir_operator.kinds import CHILD_KINDS, INFERENCE_SERVICE, Kind, KubeObject, ServiceKey
from kvasir_operator.kube import PAGE_SIZE, REQUEST_TIMEOUT_SECONDS
from kvasir_operator.pod_watch import service_key

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
    for kind in CHILD_KINDS:
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = SERVICE_LABEL
    # No watch of namespaces and CRDs, which a Role cannot allow: run.py requires our CRD at the start.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    # kopf would kill the process on its own some time after a stop; run.py bounds the stop itself.
    settings.process.ultimate_exiting_timeout = None
    return settings


def kopf_registry(
    load_configuration: Callable[[], Awaitable[Configuration]], wake: Callable[[ServiceKey], None]
) -> kopf.OperatorRegistry:
    """`wake` is called with every service that is there at the start, that changes, or whose child changes."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        # Again after each 401: a pod's token is renewed on disk.
        return await kopf_credentials(await load_configuration())

    @kopf.on.event(*_selector(INFERENCE_SERVICE), registry=registry)
    async def service_event(body: kopf.Body, **_: Any) -> None:
        wake(ServiceKey(body["metadata"]["namespace"], body["metadata"]["name"]))

    async def child_event(body: kopf.Body, **_: Any) -> None:
        key = service_key(_plain_metadata(body))
        if key is not None:
            wake(key)

    for kind in CHILD_KINDS:
        kopf.on.event(*_selector(kind), registry=registry, id=f"{kind.plural}_event")(child_event)
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


def _selector(kind: Kind) -> tuple[str, str, str]:
    return (kind.group, kind.version, kind.plural)


def _plain_metadata(body: kopf.Body) -> KubeObject:
    metadata = body["metadata"]
    return {"metadata": {"namespace": metadata["namespace"], "labels": dict(metadata.get("labels", {}))}}
