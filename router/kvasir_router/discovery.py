"""Which services there are and where their engines listen, as the flags say: fixed addresses, the EndpointSlices of one
service, or the InferenceServices of namespaces.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvasir_router.config import RouterConfig
from kvasir_router.endpoints.address import Address, Role
from kvasir_router.endpoints.gateway_source import GatewaySource, ScopeApi
from kvasir_router.endpoints.kubernetes import KubernetesSource, ServiceReference
from kvasir_router.endpoints.reflector import ObjectApi
from kvasir_router.gateway import Gateway
from kvasir_router.metrics import Metrics
from kvasir_router.service.factory import ServiceFactory, ServiceSettings
from kvasir_router.service.registry import EndpointState
from kvasir_router.service.series import ServiceCollector
from kvasir_router.service.service import DedicatedService, Service, Services

logger = logging.getLogger(__name__)

_ALL_NAMESPACES = "*"


class StaticSource:
    """Endpoints named on the command line: published once, usable when their first probe succeeds."""

    is_trusted_ready = False

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = frozenset(addresses)
        self.is_synced = False

    async def run(self, publish: Callable[[frozenset[Address]], None]) -> None:
        publish(self._addresses)
        self.is_synced = True


class Kubernetes(Protocol):
    """What is followed in a cluster; a namespace None is all of them."""

    def slices_of(self, service: ServiceReference) -> ObjectApi: ...

    def slices(self, namespace: str | None) -> ObjectApi: ...

    def inference_services(self, namespace: str | None) -> ObjectApi: ...


@dataclass(frozen=True)
class Discovery:
    services: Services
    is_synced: Callable[[], bool]
    """Whether everything that was there at the start is known."""
    run: Callable[[], Coroutine[Any, Any, None]]
    """Follows until cancelled."""


@contextlib.asynccontextmanager
async def discovering(
    config: RouterConfig, factory: ServiceFactory, metrics: Metrics, kubernetes: Kubernetes | None, secret: str | None
) -> AsyncIterator[Discovery]:
    """`kubernetes` None: the cluster that the environment tells of. `secret` is what engines know the router by; a
    gateway derives one of it for each service.
    """
    reference = None if config.endpoints_service is None else ServiceReference.parse(config.endpoints_service)
    async with contextlib.AsyncExitStack() as stack:
        addresses = _static_addresses(config)
        if not addresses and kubernetes is None:
            from kvasir_router.endpoints import kubernetes_api  # 160 ms and 11 MB, not for fixed addresses

            kubernetes = await stack.enter_async_context(kubernetes_api.connect())
        if kubernetes is None:
            found = _dedicated(config, factory, metrics, StaticSource(addresses), "", secret)
        elif reference is None:
            found = _gateway(config, factory, metrics, kubernetes, secret)
        else:
            source = KubernetesSource(kubernetes.slices_of(reference), reference.port)
            found = _dedicated(config, factory, metrics, source, f"{reference.namespace}/{reference.name}", secret)
        stack.push_async_callback(found.services.close)
        yield found


def _static_addresses(config: RouterConfig) -> list[Address]:
    """As the flags name them; none where a cluster tells."""
    urls = {Role.SERVE: config.endpoint, Role.PREFILL: config.prefill_endpoint, Role.DECODE: config.decode_endpoint}
    return [Address(url.rstrip("/"), role=role) for role, named in urls.items() for url in named]


def _dedicated(
    config: RouterConfig,
    factory: ServiceFactory,
    metrics: Metrics,
    source: StaticSource | KubernetesSource,
    name: str,
    secret: str | None,
) -> Discovery:
    service = factory.create(_own_settings(config, name, secret))
    initial_state = EndpointState.READY if source.is_trusted_ready else EndpointState.UNKNOWN
    services = DedicatedService(service, partial(_follow, metrics, initial_state))
    return Discovery(services, lambda: source.is_synced, lambda: source.run(services.publish))


def _gateway(
    config: RouterConfig, factory: ServiceFactory, metrics: Metrics, kubernetes: Kubernetes, secret: str | None
) -> Discovery:
    namespaces = [None if name == _ALL_NAMESPACES else name for name in config.gateway]
    source = GatewaySource([ScopeApi(kubernetes.inference_services(one), kubernetes.slices(one)) for one in namespaces])
    services = Gateway(factory, partial(_follow, metrics, EndpointState.READY), secret)
    metrics.add(ServiceCollector(services))
    return Discovery(services, lambda: source.is_synced, lambda: source.run(services.publish))


def _own_settings(config: RouterConfig, name: str, router_secret: str | None) -> ServiceSettings:
    """Of the one service that this router is dedicated to."""
    return ServiceSettings(
        name=name,
        model=config.model,
        aliases=config.model_alias,
        adapters=(),
        created=int(time.time()),
        policy=config.policy,
        remote_prefill_min_tokens=config.remote_prefill_min_tokens,
        max_queue_size=config.max_queue_size,
        max_queue_wait_seconds=config.max_queue_wait,
        router_secret=router_secret,
    )


def _follow(metrics: Metrics, initial_state: EndpointState, service: Service, addresses: Set[Address]) -> None:
    """The state is what new endpoints have until they are probed: Kubernetes knows which are ready, flags do not."""
    urls, revisions = service.registry.urls(), service.registry.revisions()
    service.follow(addresses, initial_state)
    for url in urls - service.registry.urls():
        metrics.forget_endpoint(url)
    for revision in revisions - service.registry.revisions():
        metrics.forget_revision(revision)
    if urls != service.registry.urls():
        logger.info("endpoints of %s: %s", service.name or "the service", ", ".join(sorted(service.registry.urls())))
