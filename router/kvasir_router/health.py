"""Probes every endpoint: does it live, is it ready, which models has it, how full is its KV cache.

An endpoint that refused a connection is out at once and back as soon as a probe succeeds, tried five times a second.
One that is unhealthy by its own word, or silent to probe after probe (stopped, or its node is lost), will not end what
it has begun either: its requests in flight are interrupted. Endpoints that Kubernetes has taken away are watched until
those are over.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto

import aiohttp
import msgspec

from kvasir_router.endpoints.endpoint import Address
from kvasir_router.fleet import EndpointState, Fleet
from kvasir_router.kv_metrics import parse_kv_metrics

logger = logging.getLogger(__name__)

_RECOVERY_INTERVAL_SECONDS = 0.2
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# A busy engine may miss a probe; a refused connection or an answer counts at once. With the default interval a stopped
# engine is found within 7.4 s: 1 s until the next probe, three of 2 s, and 0.2 s between them.
_SILENT_PROBES_TO_EJECT = 3
_NOBODY_THERE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


class _Finding(Enum):
    READY = auto()
    NOT_READY = auto()  # it says so: loading or draining
    UNHEALTHY = auto()  # it says so: its engine is dead or hung
    REFUSED = auto()  # nothing listens there; what it has begun it may yet end
    SILENT = auto()


class _Card(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    """The part of /v1/models that routing needs."""

    data: list[_Card]


@dataclass(eq=False)
class _Watch:
    url: str
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_silent: int = 0
    is_gone: bool = False  # no endpoint any more
    task: asyncio.Task[None] | None = None


class Prober:
    """Owns one task per endpoint."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        interval_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._interval_seconds = interval_seconds
        self._watches: dict[Address, _Watch] = {}

    def follow(self, addresses: Set[Address]) -> None:
        """Starts tasks for new addresses; those of gone ones end with the last request in flight there."""
        for address, watch in self._watches.items():
            if address not in addresses and not watch.is_gone:
                watch.wake.set()
            watch.is_gone = address not in addresses
        for address in addresses - self._watches.keys():
            watch = self._watches[address] = _Watch(address.url)
            watch.task = asyncio.create_task(self._run(address, watch), name=f"probe {address.url}")

    def eject(self, url: str) -> None:
        """No new requests until a probe succeeds; the next probe is due now."""
        self._fleet.set_state(url, EndpointState.UNREACHABLE)
        for watch in self._watches.values():
            if watch.url == url:
                watch.wake.set()

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, address: Address, watch: _Watch) -> None:
        while not watch.is_gone or self._fleet.has_in_flight(watch.url):
            try:
                await self._probe(watch)
            except Exception:
                logger.exception("probe of %s failed", watch.url)
            watch.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next(watch)):
                    await watch.wake.wait()
        del self._watches[address]

    def _seconds_to_next(self, watch: _Watch) -> float:
        if (watch.is_gone or self._is_ready(watch)) and not watch.num_silent:
            return self._interval_seconds
        return min(self._interval_seconds, _RECOVERY_INTERVAL_SECONDS)

    async def _probe(self, watch: _Watch) -> None:
        finding = await self._find(watch.url)
        watch.num_silent = watch.num_silent + 1 if finding is _Finding.SILENT else 0
        if not watch.is_gone:
            self._report(watch, self._state(watch, finding))
        if finding is _Finding.UNHEALTHY or watch.num_silent >= _SILENT_PROBES_TO_EJECT:
            self._fleet.interrupt(watch.url)
        if finding is _Finding.READY and not watch.is_gone:
            for learn in (self._learn_models, self._learn_kv):
                with contextlib.suppress(aiohttp.ClientError, OSError, msgspec.DecodeError):
                    await learn(watch.url)

    async def _find(self, url: str) -> _Finding:
        try:
            # An engine of another make has no /ready (404); that it answers must do.
            if await self._status(f"{url}/ready") in (200, 404):
                return _Finding.READY
            return _Finding.UNHEALTHY if await self._status(f"{url}/health") >= 500 else _Finding.NOT_READY
        except TimeoutError:
            return _Finding.SILENT
        except aiohttp.ClientConnectorError as error:
            return _Finding.SILENT if error.os_error.errno in _NOBODY_THERE else _Finding.REFUSED
        except (aiohttp.ClientError, OSError):
            return _Finding.REFUSED

    def _state(self, watch: _Watch, finding: _Finding) -> EndpointState:
        match finding:
            case _Finding.READY:
                return EndpointState.READY
            case _Finding.NOT_READY:
                return EndpointState.NOT_READY
            case _Finding.SILENT if watch.num_silent < _SILENT_PROBES_TO_EJECT and self._is_ready(watch):
                return EndpointState.READY
        return EndpointState.UNREACHABLE

    def _is_ready(self, watch: _Watch) -> bool:
        return self._fleet.state_of(watch.url) is EndpointState.READY

    def _report(self, watch: _Watch, state: EndpointState) -> None:
        before = self._fleet.state_of(watch.url)
        if before is not None and before != state:
            logger.info("endpoint %s is %s (was %s)", watch.url, state, before)
            self._fleet.set_state(watch.url, state)

    async def _learn_models(self, url: str) -> None:
        listing = msgspec.json.decode(await self._get(f"{url}/v1/models"), type=_Listing)
        self._fleet.set_models(url, frozenset(card.id for card in listing.data))

    async def _learn_kv(self, url: str) -> None:
        metrics = parse_kv_metrics((await self._get(f"{url}/metrics")).decode())
        self._fleet.set_kv(url, metrics.usage, metrics.capacity_tokens)

    async def _status(self, url: str) -> int:
        async with self._session.get(url, timeout=_PROBE_TIMEOUT) as response:
            return response.status

    async def _get(self, url: str) -> bytes:
        """Raises aiohttp.ClientResponseError where the engine has no such page."""
        async with self._session.get(url, timeout=_PROBE_TIMEOUT, raise_for_status=True) as response:
            return await response.read()
