"""Has engines that drain hand this router's streams over, so that they can end at once and no client waits for a
recomputation.

An engine that exchanges KV with others ends such a stream in the middle, and keeps its blocks; it is then continued
like one whose engine was lost, and the engine that goes on finds in the stream's journal where the blocks are. Only as
many are asked for as other engines of the same revision have room for: the rest end where they are. Other routers'
streams are theirs to ask for, since they know whether there is room for those.
"""

import asyncio
import logging

import aiohttp

from kvasir_router.endpoints.address import Address
from kvasir_router.relay.proxy import ROUTER_SECRET_HEADER
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.registry import Registry

logger = logging.getLogger(__name__)

MIGRATE_REQUEST_PATH = "/migrate/request"
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class Migration:
    def __init__(
        self, registry: Registry, ledger: Ledger, session: aiohttp.ClientSession, router_secret: str | None
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._session = session
        self._headers = {} if router_secret is None else {ROUTER_SECRET_HEADER: router_secret}
        self._asked: dict[str, set[int]] = {}  # numbers of tickets, by the url of an engine that drains

    async def drains(self, address: Address) -> None:
        """It takes no requests now. To be called again and again: a stream can move once it has begun."""
        tickets = self._ledger.tickets(address.url)
        asked = self._asked.pop(address.url, set()) & {ticket.number for ticket in tickets}
        if not tickets:
            return
        self._asked[address.url] = asked
        movable = [ticket for ticket in tickets if ticket.can_move and ticket.number not in asked]
        leaving = movable[: self._num_places_elsewhere(address)]
        accepted = await asyncio.gather(*(self._hand_over(address.url, ticket.request_id) for ticket in leaving))
        asked.update(ticket.number for ticket, is_accepted in zip(leaving, accepted, strict=True) if is_accepted)

    async def _hand_over(self, url: str, request_id: str) -> bool:
        """The stream of that id, as the engine knows it. False: it will not."""
        body = {"request_id": request_id}
        try:
            async with self._session.post(
                f"{url}{MIGRATE_REQUEST_PATH}", json=body, headers=self._headers, timeout=_TIMEOUT
            ) as response:
                logger.debug("%s asked to hand it over: %d", url, response.status, extra={"request_id": request_id})
                return response.status == 202
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.info("%s cannot be asked to hand it over: %s", url, error, extra={"request_id": request_id})
            return False

    def _num_places_elsewhere(self, address: Address) -> int:
        return sum(
            max(0, endpoint.load.max_in_flight - endpoint.load.num_requests)
            for endpoint in self._registry.serving(None)
            if endpoint.url != address.url and endpoint.revision == address.revision
        )
