"""Endpoints named on the command line: a fixed set, whose health only probes can tell."""

from collections.abc import Callable, Iterable

from kvasir_router.endpoints.address import Address


class StaticSource:
    """Publishes its addresses once; they are usable when their first probe succeeds."""

    is_trusted_ready = False

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._addresses = frozenset(addresses)
        self.is_synced = False

    async def run(self, publish: Callable[[frozenset[Address]], None]) -> None:
        publish(self._addresses)
        self.is_synced = True
