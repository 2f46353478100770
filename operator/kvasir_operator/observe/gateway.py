"""What a pass must know of the installation's gateway: whether it takes requests, and which names are a service's own.

Names come from one list of all services, and from then on from each one's passes; the gateway's Deployment, one object,
is looked at every few seconds. What changes of either wakes the services that it concerns.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.errors import KubeApiError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, KubeObject, ServiceKey, service_key
from kvasir_operator.observe.model_names import GatewayState, ModelNames, claimed_names

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0


class GatewayObserver:
    """`gateway` None: the installation has none. `namespaces` None is the whole cluster."""

    def __init__(
        self,
        client: KubeClient,
        gateway: GatewayDefaults | None,
        namespaces: Sequence[str] | None,
        wake: Callable[[ServiceKey], None],
    ) -> None:
        self._client = client
        self._gateway = gateway
        self._namespaces: Sequence[str | None] = (None,) if namespaces is None else namespaces
        self._wake = wake
        self._names = ModelNames()
        self._has_listed = False
        self._listing = asyncio.Lock()
        self._is_ready: bool | None = None

    async def state_of(self, service: KubeObject) -> GatewayState | None:
        """`service` as the pass has read it; None where it is not behind the gateway, or there is none.

        Raises KubeApiError where nothing is known yet and cannot be asked for.
        """
        if self._gateway is None:
            return None
        await self._list_once()
        self._wake_all(self._names.put(service))
        if not claimed_names(service):
            return None
        if self._is_ready is None:
            self._is_ready = await self._look(self._gateway)
        key = service_key(service)
        return GatewayState(self._is_ready, self._names.names(key), self._names.taken(key))

    def forget(self, key: ServiceKey) -> None:
        """The service is gone."""
        self._wake_all(self._names.remove(key))

    async def run(self, look_seconds: float = LOOK_SECONDS) -> None:
        """Looks at the gateway until cancelled; ends where there is none."""
        while self._gateway is not None:
            await asyncio.sleep(look_seconds)
            await self._look_again(self._gateway, look_seconds)

    async def _look_again(self, gateway: GatewayDefaults, look_seconds: float) -> None:
        try:
            is_ready = await self._look(gateway)
        except KubeApiError as error:
            logger.warning("the gateway's Deployment cannot be read, again in %g s: %s", look_seconds, error)
            return
        if is_ready != self._is_ready:
            logger.info("the gateway is %s", "ready" if is_ready else "not ready")
            self._is_ready = is_ready
            self._wake_all(self._names.claimants())

    async def _look(self, gateway: GatewayDefaults) -> bool:
        deployment = await self._client.get(DEPLOYMENT, gateway.namespace, gateway.name) or {}
        return bool(deployment.get("status", {}).get("readyReplicas", 0))

    async def _list_once(self) -> None:
        """The oldest service has the name, whichever has its pass first."""
        async with self._listing:
            if self._has_listed:
                return
            for namespace in self._namespaces:
                for service in await self._client.list(INFERENCE_SERVICE, namespace):
                    self._wake_all(self._names.put(service))
            self._has_listed = True

    def _wake_all(self, keys: set[ServiceKey]) -> None:
        for key in keys:
            self._wake(key)
