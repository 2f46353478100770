"""Probes every endpoint: does it live, is it ready, which models has it, how full is its KV cache.

An endpoint that refused a connection is out at once and back as soon as a probe succeeds, tried five times a second.
One that is unhealthy by its own word, twice in a row, will not end what it has begun either: its requests in flight are
interrupted. Said once, it may be a proxy's word for a moment: then only those are that another takes. So are those of
one that is silent: once it takes no connection (its node is lost), and where it does (it is busy, or stopped), after a
longer time in which no byte of any answer has come. Endpoints that Kubernetes has taken away are watched until their
requests are over.
"""

import asyncio
import contextlib
import errno
import logging
import math
import random
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import aiohttp
import msgspec

from kvasir_router.config import PROBE_LIMITS, ProbeLimits
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.index import PrefixIndex
from kvasir_router.service.kv_metrics import parse_kv_metrics
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.migration import Migration
from kvasir_router.service.registry import EndpointState, Registry

logger = logging.getLogger(__name__)

_RECOVERY_INTERVAL_SECONDS = 0.2
# Adapters come and go seldom; so many probes later their list is read again.
_PROBES_PER_LISTING = 5
_NO_ANSWER = (aiohttp.ClientError, OSError, msgspec.DecodeError, UnicodeError)
_UNHEALTHY_IN_A_ROW = 2
# An engine of another make has no /ready, or keeps it to itself.
_NO_WORD = frozenset({401, 403, 404, 405})
_NOBODY_THERE = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})


@dataclass(frozen=True)
class ProbeTimes:
    """Seconds, where nothing else is said.

    Behind a gateway most services may be asked nothing for hours. `idle_after` its last request a service is idle: its
    engines are probed so many times more seldom, and not scraped, until the next request comes. By chance between two
    bounds, so that the probes of a thousand engines do not come all at once.
    """

    instance_timeout: float = 0.5
    """An engine that came back gets no requests until it has said which process it is, or has not in this time."""
    idle_after: float = 5.0
    idle_intervals: tuple[float, float] = (5.0, 15.0)
    """In intervals of a service that is not idle."""


PROBE_TIMES = ProbeTimes()
PROBES_PER_SECOND = 200.0
_BURST_SECONDS = 0.25


class ProbePace:
    """How many probes may begin in a second, of all services together.

    A gateway may have thousands of endpoints, all of which are new when it starts. Who comes too early waits for its
    turn, first come, first served; so intervals stretch where there are more endpoints than the pace allows for.
    """

    def __init__(self, per_second: float = PROBES_PER_SECOND) -> None:
        self._spacing_seconds = 1 / per_second
        self._next_at = 0.0  # of the event loop's clock: when the next one would begin if none could begin early

    async def turn(self) -> None:
        """Returns when a probe may begin."""
        now = asyncio.get_running_loop().time()
        begin = max(self._next_at, now - _BURST_SECONDS)
        self._next_at = begin + self._spacing_seconds
        if begin > now:
            await asyncio.sleep(begin - now)


_CONNECT_SHARE = 0.75
"""Of the time for a probe: what is left tells an engine that has taken the connection from one that has not."""


class _Finding(Enum):
    READY = auto()
    NOT_READY = auto()  # it says so: loading or draining
    UNHEALTHY = auto()  # it says so: its engine is dead or makes no progress
    REFUSED = auto()  # nothing listens there; what it has begun it may yet end
    BUSY = auto()  # it took the connection, and did not answer in time
    SILENT = auto()


class _Card(msgspec.Struct):
    id: str
    max_model_len: Any = None

    @property
    def length(self) -> int | None:
        """Engines of other makes may say it in another form."""
        return self.max_model_len if type(self.max_model_len) is int and self.max_model_len > 0 else None


class _Load(msgspec.Struct):
    """The part of /load that tells one process from the next."""

    instance: str | None = None


class _Listing(msgspec.Struct):
    """The part of /v1/models that routing needs."""

    data: list[_Card]


@dataclass(eq=False)
class _Watch:
    address: Address
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    num_silent: int = 0
    num_unhealthy: int = 0  # in a row
    heard_at: float = 0.0  # of the event loop's clock: an answer to a probe, or a byte of any other
    instance: str | None = None  # of the process that was ready last; None: not known
    has_been_ready: bool = False
    has_listed: bool = False  # its models
    num_since_listed: int = 0  # probes
    was_scraped: bool = False
    is_gone: bool = False  # no endpoint any more
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self.address.url


class Prober:
    """Owns one task per endpoint. Services share a `pace`. `migration` None: what drains is left alone."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        interval_seconds: float,
        pace: ProbePace,
        migration: Migration | None = None,
        times: ProbeTimes = PROBE_TIMES,
        limits: ProbeLimits = PROBE_LIMITS,
        take_heard: Callable[[str], bool] = lambda url: False,
    ) -> None:
        """`take_heard`: whether a byte of an answer has come from a url since it was last asked."""
        self._registry = registry
        self._ledger = ledger
        self._index = index
        self._session = session
        self._interval_seconds = interval_seconds
        self._pace = pace
        self._migration = migration
        self._times = times
        self._limits = limits
        self._take_heard = take_heard
        self._timeout = aiohttp.ClientTimeout(total=limits.timeout, sock_connect=_CONNECT_SHARE * limits.timeout)
        self._watches: dict[Address, _Watch] = {}
        self._last_request = -math.inf  # of the event loop's clock

    def count_request(self) -> None:
        """To be called with every request for the service: its endpoints are looked at again at once if it was idle."""
        was_idle, self._last_request = self._is_idle, asyncio.get_running_loop().time()
        if was_idle:
            for watch in self._watches.values():
                watch.wake.set()

    def follow(self, addresses: Set[Address]) -> None:
        """Starts tasks for new addresses; those of gone ones end with the last request in flight there."""
        for address, watch in self._watches.items():
            if address not in addresses and not watch.is_gone:
                watch.wake.set()
            watch.is_gone = address not in addresses
        for address in addresses - self._watches.keys():
            watch = self._watches[address] = _Watch(address)
            watch.task = asyncio.create_task(self._run(address, watch), name=f"probe {address.url}")

    def eject(self, url: str) -> None:
        """No new requests until a probe succeeds; the next probe is due now."""
        self._set_state(url, EndpointState.UNREACHABLE)
        for watch in self._watches.values():
            if watch.url == url:
                watch.wake.set()

    @property
    def num_watched(self) -> int:
        """Endpoints, with those that are gone and whose requests are not over."""
        return len(self._watches)

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, address: Address, watch: _Watch) -> None:
        while not watch.is_gone or (self._ledger.has_in_flight(watch.url) and not self._is_succeeded(watch)):
            try:
                await self._pace.turn()
                await self._probe(watch)
            except Exception:
                logger.exception("probe of %s failed", watch.url)
            watch.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_next(watch)):
                    await watch.wake.wait()
        del self._watches[address]

    def _is_succeeded(self, gone: _Watch) -> bool:
        """Another pod has its address by now, whose own watch tells of whatever is in flight there."""
        return any(watch.url == gone.url and not watch.is_gone for watch in self._watches.values())

    def _seconds_to_next(self, watch: _Watch) -> float:
        if (watch.is_gone or self._is_ready(watch)) and not watch.num_silent:
            can_wait = self._is_idle and watch.has_listed and not watch.is_gone
            return self._interval_seconds * (random.uniform(*self._times.idle_intervals) if can_wait else 1)
        if self._is_idle:
            return self._interval_seconds
        return min(self._interval_seconds, _RECOVERY_INTERVAL_SECONDS)

    async def _probe(self, watch: _Watch) -> None:
        finding = await self._find(watch.url)
        was_heard = self._take_heard(watch.url)
        is_silent, now = finding in (_Finding.BUSY, _Finding.SILENT), asyncio.get_running_loop().time()
        if not is_silent or was_heard:
            watch.num_silent, watch.heard_at = 0, now
        else:
            watch.num_silent += 1
        if finding is _Finding.READY and not watch.has_listed and not watch.is_gone:
            await self._learn_instance(watch)
        if not watch.is_gone:
            self._report(watch, self._state(watch, finding))
        if finding is _Finding.NOT_READY and self._migration is not None:
            await self._migration.drains(watch.address)
        watch.num_unhealthy = watch.num_unhealthy + 1 if finding is _Finding.UNHEALTHY else 0
        if finding is _Finding.UNHEALTHY:
            self._ledger.interrupt(watch.url, is_silent=watch.num_unhealthy < _UNHEALTHY_IN_A_ROW)
        elif self._is_out(watch) and (finding is _Finding.SILENT or now - watch.heard_at > self._limits.hung_after):
            self._ledger.interrupt(watch.url, is_silent=True)
        if finding is not _Finding.READY:
            watch.has_listed = False  # it may come back as another process
        elif not watch.is_gone:
            await self._learn(watch)

    async def _find(self, url: str) -> _Finding:
        try:
            ready = await self._status(f"{url}/ready")
            if ready == 200:
                return _Finding.READY
            health = await self._status(f"{url}/health")
            if health >= 500:
                return _Finding.UNHEALTHY
            if ready not in _NO_WORD:
                return _Finding.NOT_READY
            # Perhaps it has no /health either: then that it lists its models must do.
            alive = await self._status(f"{url}/v1/models") if health == 404 else health
            return _Finding.READY if alive == 200 else _Finding.NOT_READY
        except aiohttp.ConnectionTimeoutError:
            return _Finding.SILENT
        except TimeoutError:
            return _Finding.BUSY
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
            case _Finding.SILENT | _Finding.BUSY if not self._is_out(watch) and self._is_ready(watch):
                return EndpointState.READY
            case _Finding.BUSY if self._is_known(watch):
                return EndpointState.NOT_READY  # what it has cached is there still
            case _Finding.UNHEALTHY if self._is_known(watch) and watch.num_unhealthy + 1 < _UNHEALTHY_IN_A_ROW:
                return EndpointState.NOT_READY
        return EndpointState.UNREACHABLE

    def _is_out(self, watch: _Watch) -> bool:
        return watch.num_silent >= self._limits.failures

    def _is_known(self, watch: _Watch) -> bool:
        """It has answered, and still counts as the process that did."""
        return self._registry.state_of(watch.url) in (EndpointState.READY, EndpointState.NOT_READY)

    @property
    def _is_idle(self) -> bool:
        return asyncio.get_running_loop().time() - self._last_request > self._times.idle_after

    def _is_ready(self, watch: _Watch) -> bool:
        return self._registry.state_of(watch.url) is EndpointState.READY

    def _report(self, watch: _Watch, state: EndpointState) -> None:
        before = self._registry.state_of(watch.url)
        if before is not None and before != state:
            logger.info("endpoint %s is %s (was %s)", watch.url, state, before)
            self._set_state(watch.url, state)

    async def _learn(self, watch: _Watch) -> None:
        watch.num_since_listed += 1
        if not watch.has_listed or watch.num_since_listed >= _PROBES_PER_LISTING:
            with contextlib.suppress(*_NO_ANSWER):
                await self._learn_models(watch.url)
                watch.has_listed, watch.num_since_listed = True, 0
        if (watch.was_scraped and self._is_idle) or self._has_fresh_report(watch.url):
            return
        with contextlib.suppress(*_NO_ANSWER):
            await self._learn_kv(watch.url)
            watch.was_scraped = True

    async def _learn_instance(self, watch: _Watch) -> None:
        """What another process had cached is not counted on; one that was not ready and does not say may be another."""
        before, was_ready = watch.instance, watch.has_been_ready
        watch.instance, watch.has_been_ready = None, True
        with contextlib.suppress(*_NO_ANSWER):
            limit = aiohttp.ClientTimeout(total=self._times.instance_timeout)
            load = msgspec.json.decode(await self._get(f"{watch.url}/load", limit), type=_Load)
            watch.instance = load.instance
        state = self._registry.state_of(watch.url)
        is_told = before is not None and watch.instance is not None
        is_another = before != watch.instance if is_told else state is EndpointState.NOT_READY
        if was_ready and is_another and state is not EndpointState.UNREACHABLE:
            self._index.withdraw(watch.url)

    async def _learn_models(self, url: str) -> None:
        listing = msgspec.json.decode(await self._get(f"{url}/v1/models"), type=_Listing)
        self._registry.set_models(url, {card.id: card.length for card in listing.data})

    async def _learn_kv(self, url: str) -> None:
        metrics = parse_kv_metrics((await self._get(f"{url}/metrics")).decode())
        endpoint = self._registry.get(url)
        if endpoint is not None:
            endpoint.load.scraped(metrics.usage, metrics.capacity_tokens, metrics.num_waiting, time.perf_counter())

    def _has_fresh_report(self, url: str) -> bool:
        """The engine has told its load itself, just now."""
        endpoint = self._registry.get(url)
        return endpoint is not None and endpoint.load.has_fresh_report(time.perf_counter())

    def _set_state(self, url: str, state: EndpointState) -> None:
        """What an unreachable endpoint had cached is not counted on any more: it may come back as another process."""
        self._registry.set_state(url, state)
        if state is EndpointState.UNREACHABLE:
            self._index.withdraw(url)

    async def _status(self, url: str) -> int:
        async with self._session.get(url, timeout=self._timeout) as response:
            return response.status

    async def _get(self, url: str, limit: aiohttp.ClientTimeout | None = None) -> bytes:
        """Raises aiohttp.ClientResponseError where the engine has no such page."""
        async with self._session.get(url, timeout=limit or self._timeout, raise_for_status=True) as response:
            return await response.read()
