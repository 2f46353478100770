"""Endpoints named on the command line: a fixed set, whose health only probes can tell."""

import asyncio
from collections.abc import Callable, Sequence

from kvasir_router.endpoints.endpoint import Address


class StaticSource:
    """Publishes its addresses once; they are usable when their first probe succeeds."""

    is_trusted_ready = False

    def __init__(self, urls: Sequence[str]) -> None:
        self._addresses = frozenset(Address(url.rstrip("/")) for url in urls)
        self.synced = asyncio.Event()

    async def run(self, publish: Callable[[frozenset[Address]], None]) -> None:
        publish(self._addresses)
        self.synced.set()
