"""Has engines hand streams over: those that drain all of them, so that they can end at once and no client waits for a
recomputation, others the one that is named.

An engine that exchanges KV with others ends its streams in the middle, and keeps their blocks; each is then continued
like one whose engine was lost, and the engine that goes on finds in the stream's journal where the blocks are. All
streams are asked for only where other engines of the same revision have room for them: else they end where they are.
"""

import logging

import aiohttp

from kvasir_router.endpoints.address import Address
from kvasir_router.relay.proxy import ROUTER_SECRET_HEADER
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.registry import Registry

logger = logging.getLogger(__name__)

MIGRATE_PATH = "/migrate"
MIGRATE_REQUEST_PATH = f"{MIGRATE_PATH}/request"
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class Migration:
    def __init__(
        self, registry: Registry, ledger: Ledger, session: aiohttp.ClientSession, router_secret: str | None
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._session = session
        self._headers = {} if router_secret is None else {ROUTER_SECRET_HEADER: router_secret}

    async def drains(self, address: Address) -> None:
        """It takes no requests now. To be called again and again: a stream can move once it has begun."""
        if not 0 < self._ledger.num_in_flight(address.url) <= self._num_places_elsewhere(address):
            return  # what finds no room would wait, and the engine lets go of all streams at once
        try:
            async with self._session.post(
                f"{address.url}{MIGRATE_PATH}", headers=self._headers, timeout=_TIMEOUT
            ) as response:
                logger.debug("endpoint %s drains; asked to hand its streams over: %d", address.url, response.status)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.info("endpoint %s drains, and cannot be asked to hand its streams over: %s", address.url, error)

    async def hand_over(self, url: str, request_id: str) -> bool:
        """The stream of that id, as the engine knows it. False: it will not."""
        body = {"request_id": request_id}
        try:
            async with self._session.post(
                f"{url}{MIGRATE_REQUEST_PATH}", json=body, headers=self._headers, timeout=_TIMEOUT
            ) as response:
                logger.debug("request_id=%s: %s asked to hand it over: %d", request_id, url, response.status)
                return response.status == 202
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.info("request_id=%s: %s cannot be asked to hand it over: %s", request_id, url, error)
            return False

    def _num_places_elsewhere(self, address: Address) -> int:
        return sum(
            max(0, endpoint.load.max_in_flight - endpoint.load.num_in_flight)
            for endpoint in self._registry.serving(None)
            if endpoint.url != address.url and endpoint.revision == address.revision
        )
