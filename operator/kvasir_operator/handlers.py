"""kopf as the operator's lifecycle and as the source of services' events; children are seen by observe/informer.py.

It hears the signals, starts and stops our parts, logs in, and puts the key of a service whose spec changed into our own
queue. Nothing here writes annotations, finalizers or Events to the cluster.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from kvasir_operator.api.labels import GROUP
from kvasir_operator.kube.client import PAGE_SIZE
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, ServiceKey, service_key
from kvasir_operator.kube.session import REQUEST_TIMEOUT_SECONDS

# A watch is opened anew this often even when it seems alive. Whole seconds: the API server refuses "240.0".
WATCH_SECONDS = 240


@dataclass(frozen=True)
class Lifecycle:
    """`start` is awaited before services are watched, `stop` after, unless `start` was cancelled."""

    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]


class SeenSpecs:
    """Tells what is news of a service's spec from changes of its status, which are mostly our own doing."""

    def __init__(self) -> None:
        self._seen: dict[ServiceKey, tuple[str, int, bool]] = {}

    def is_news(self, event_type: str | None, metadata: Mapping[str, Any]) -> bool:
        """`event_type` is the watch's, None for an object of the first list."""
        key = ServiceKey(metadata["namespace"], metadata["name"])
        if event_type == "DELETED":
            self._seen.pop(key, None)
            return True
        spec = (metadata["uid"], metadata["generation"], "deletionTimestamp" in metadata)
        if self._seen.get(key) == spec:
            return False
        self._seen[key] = spec
        return True


class NoDiffBase(kopf.DiffBaseStorage):
    """No handler of ours compares a service with its former self, for which kopf would copy every object it hears of
    (docs/decisions/0012 says what that took)."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is written to a cluster's objects by kopf."""


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
    # No watch of namespaces and CRDs, which a Role cannot allow: kube/features.py requires our CRD at the start.
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/unused"
    settings.persistence.diffbase_storage = NoDiffBase()
    # kopf would kill the process on its own some time after a stop; parts.py bounds the stop itself.
    settings.process.ultimate_exiting_timeout = None
    return settings


def kopf_registry(
    lifecycle: Lifecycle,
    load_configuration: Callable[[], Awaitable[Configuration]],
    wake: Callable[[ServiceKey], None],
    watch_service: Callable[[str | None, Mapping[str, Any]], None],
) -> kopf.OperatorRegistry:
    """`wake` is called with every service that is there at the start, is made, changes its spec, or goes.

    `watch_service` is called with every event of a service: the watch's type, None at the start, and the object.
    """
    registry, specs = kopf.OperatorRegistry(), SeenSpecs()

    # An error ends the operator; kopf would try again, each time after a minute.
    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def startup(**_: Any) -> None:
        await lifecycle.start()

    @kopf.on.cleanup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def cleanup(**_: Any) -> None:
        await lifecycle.stop()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        # Again after each 401: a pod's token is renewed on disk.
        return await kopf_credentials(await load_configuration())

    @kopf.on.event(INFERENCE_SERVICE.group, INFERENCE_SERVICE.version, INFERENCE_SERVICE.plural, registry=registry)
    async def service_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        watch_service(type, body)
        if specs.is_news(type, body["metadata"]):
            wake(service_key(body))

    return registry


async def kopf_credentials(configuration: Configuration) -> kopf.ConnectionInfo:
    """The client's address, credentials and proxy, for kopf's own client."""
    authorization = await configuration.get_api_key_with_prefix("BearerToken") or ""
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme="Bearer" if authorization else None,
        token=authorization.partition(" ")[2] or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy,
    )
