"""The pods of the installation's gateway, as one turn sees them: listed for the first service that asks alone."""

import asyncio
import logging
from collections.abc import Sequence

from kvasir_operator.api.defaults import GatewayDefaults
from kvasir_operator.errors import KubeApiError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import POD, KubeObject

logger = logging.getLogger(__name__)


class GatewayPods:
    """`gateway` None: the installation has none."""

    def __init__(self, client: KubeClient, gateway: GatewayDefaults | None) -> None:
        self._client = client
        self._gateway = gateway
        self._listing = asyncio.Lock()
        self._found: Sequence[KubeObject] | None = None

    async def list(self) -> Sequence[KubeObject]:
        """Empty where they cannot be listed: roles that somebody else made may not let the operator see them."""
        async with self._listing:
            if self._found is None:
                self._found = await self._list()
            return self._found

    async def _list(self) -> Sequence[KubeObject]:
        if self._gateway is None:
            return ()
        try:
            return await self._client.list(POD, self._gateway.namespace, dict(self._gateway.pod_labels))
        except KubeApiError as error:
            logger.debug("the gateway's pods cannot be listed: %s", error)
            return ()
