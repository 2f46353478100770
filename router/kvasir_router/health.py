"""Probes every endpoint: is it ready, which models has it, how full is its KV cache.

An endpoint that refused a connection is out at once and back as soon as a probe succeeds, tried five times a second.
Where Kubernetes tells readiness, only ejected endpoints are probed for it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Set
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvasir_router.endpoints.endpoint import Address
from kvasir_router.fleet import EndpointState, Fleet
from kvasir_router.kv_metrics import parse_kv_metrics

logger = logging.getLogger(__name__)

_RECOVERY_INTERVAL_SECONDS = 0.2
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# A busy engine may miss a probe; a refused connection or an answer counts at once.
_TIMEOUTS_TO_EJECT = 3


class _Card(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    """The part of /v1/models that routing needs."""

    data: list[_Card]


@dataclass(eq=False)
class _Watch:
    url: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_timeouts: int = 0
    task: asyncio.Task[None] | None = None


class Prober:
    """Owns one task per endpoint. `is_trusted_ready`: the source publishes only ready endpoints."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        interval_seconds: float,
        *,
        is_trusted_ready: bool,
        learn_models: bool,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._interval_seconds = interval_seconds
        self._is_trusted_ready = is_trusted_ready
        self._learn_models = learn_models
        self._watches: dict[Address, _Watch] = {}

    def follow(self, addresses: Set[Address]) -> None:
        """Starts and stops tasks so that exactly these addresses are probed."""
        for address in self._watches.keys() - addresses:
            watch = self._watches.pop(address)
            if watch.task is not None:
                watch.task.cancel()
        for address in addresses - self._watches.keys():
            watch = self._watches[address] = _Watch(address.url)
            watch.task = asyncio.create_task(self._run(watch), name=f"probe {address.url}")

    def eject(self, url: str) -> None:
        """No new requests until a probe succeeds; the next probe is due now."""
        self._fleet.set_state(url, EndpointState.UNREACHABLE)
        for watch in self._watches.values():
            if watch.url == url:
                watch.wake.set()

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        self.follow(frozenset())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, watch: _Watch) -> None:
        while True:
            try:
                await self._probe(watch)
            except Exception:
                logger.exception("probe of %s failed", watch.url)
            is_ready = self._fleet.state_of(watch.url) is EndpointState.READY
            watch.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds if is_ready else self._recovery_interval):
                    await watch.wake.wait()

    @property
    def _recovery_interval(self) -> float:
        return min(self._interval_seconds, _RECOVERY_INTERVAL_SECONDS)

    async def _probe(self, watch: _Watch) -> None:
        if not self._is_trusted_ready or self._fleet.state_of(watch.url) is not EndpointState.READY:
            self._report(watch, await self._readiness(watch))
        if self._fleet.state_of(watch.url) is EndpointState.READY:
            with contextlib.suppress(aiohttp.ClientError, OSError, msgspec.DecodeError):
                await self._learn(watch.url)

    async def _readiness(self, watch: _Watch) -> EndpointState:
        try:
            async with self._session.get(f"{watch.url}/ready", timeout=_PROBE_TIMEOUT) as response:
                watch.num_timeouts = 0
                # An engine of another make has no /ready (404); that it answers must do.
                return EndpointState.READY if response.status in (200, 404) else EndpointState.NOT_READY
        except TimeoutError:
            watch.num_timeouts += 1
            state = self._fleet.state_of(watch.url)
            if state is EndpointState.READY and watch.num_timeouts < _TIMEOUTS_TO_EJECT:
                return state
            return EndpointState.UNREACHABLE
        except (aiohttp.ClientError, OSError):
            return EndpointState.UNREACHABLE

    def _report(self, watch: _Watch, state: EndpointState) -> None:
        before = self._fleet.state_of(watch.url)
        if before is not None and before != state:
            logger.info("endpoint %s is %s (was %s)", watch.url, state, before)
            self._fleet.set_state(watch.url, state)

    async def _learn(self, url: str) -> None:
        if self._learn_models:
            listing = msgspec.json.decode(await self._get(f"{url}/v1/models"), type=_Listing)
            self._fleet.set_models(url, frozenset(card.id for card in listing.data))
        metrics = parse_kv_metrics((await self._get(f"{url}/metrics")).decode())
        self._fleet.set_kv(url, metrics.usage, metrics.capacity_tokens)

    async def _get(self, url: str) -> bytes:
        """Raises aiohttp.ClientResponseError where the engine has no such page."""
        async with self._session.get(url, timeout=_PROBE_TIMEOUT, raise_for_status=True) as response:
            return await response.read()
