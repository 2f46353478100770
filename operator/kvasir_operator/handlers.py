"""kopf as the operator's lifecycle: it hears the signals, logs in, and starts and stops our parts.

Services and their children are watched by observe/informer.py; docs/decisions/0012 says why kopf does not. Nothing here
writes annotations, finalizers or Events to the cluster.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from kvasir_operator.kube.session import REQUEST_TIMEOUT_SECONDS


@dataclass(frozen=True)
class Lifecycle:
    """`stop` is awaited at the end, unless `start` was cancelled."""

    start: Callable[[], Awaitable[None]]
    stop: Callable[[], Awaitable[None]]


def kopf_settings() -> kopf.OperatorSettings:
    """Quiet, bounded in time, and in need of no rights."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_SECONDS
    # No watch of namespaces and CRDs, which a Role cannot allow: kube/features.py requires our CRD at the start.
    settings.scanning.disabled = True
    # kopf would kill the process on its own some time after a stop; parts.py bounds the stop itself.
    settings.process.ultimate_exiting_timeout = None
    return settings


def kopf_registry(
    lifecycle: Lifecycle, load_configuration: Callable[[], Awaitable[Configuration]]
) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

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
