"""Our router's own parts in virtual time: registry, loads, ledger, index and policy; only the bytes are missing.

What it knows: `heard` from KV events and load reports, both late, and its own dispatches since; `approximate` from what
it sent, and from metrics scraped once a second; `exact` from looking into the engines, which no router can.
"""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import cast

from benchmarks.routing.blocks import LateBlockMap
from benchmarks.routing.engine import Engine
from benchmarks.routing.job import Job
from benchmarks.routing.report import report_of
from benchmarks.routing.rules import World

from kvasir_router.endpoints.address import Address
from kvasir_router.placement.placement import Policy
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.prefix_index.index import PrefixIndex, PrefixKey
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import Endpoint, EndpointState, Registry

_MAX_IN_FLIGHT = 512
_TIDY_SECONDS = 1.0
_LEAST_RETRY_SECONDS = 0.005
_SCRAPE_SECONDS = 1.0


class HeardIndex:
    """What engines have told of their caches, and own dispatches until the engine will have told of them."""

    def __init__(self, urls: list[str], heard: LateBlockMap, late_seconds: float, block_tokens: int) -> None:
        self._urls = urls
        self._numbers = {url: number for number, url in enumerate(urls)}
        self._heard = heard
        self._late_seconds = late_seconds
        self._block_tokens = block_tokens
        self._guesses: list[dict[int, int]] = [{} for _ in urls]  # by engine: block -> number of dispatches
        self._told: deque[tuple[float, int, tuple[int, ...]]] = deque()

    async def key(self, prompt: object) -> PrefixKey:
        raise NotImplementedError("jobs bring their keys")

    def match(self, key: PrefixKey, now: float) -> Mapping[str, int]:
        blocks = cast(BlockHashes, key).hashes
        self._heard.hear(now)
        while self._told and self._told[0][0] <= now:
            _, engine, told = self._told.popleft()
            self._forget(engine, told)
        depths = self._heard.depths(blocks)
        for engine, guesses in enumerate(self._guesses):
            depth = depths.get(engine, 0)
            if guesses and depth < len(blocks) and blocks[depth] in guesses:
                depths[engine] = self._deepen(engine, blocks, depth)
        return {self._urls[engine]: depth * self._block_tokens for engine, depth in depths.items()}

    def insert(self, url: str, key: PrefixKey, now: float, capacity_tokens: int | None) -> None:
        guesses = self._guesses[self._numbers[url]]
        for block in cast(BlockHashes, key).hashes:
            guesses[block] = guesses.get(block, 0) + 1

    def is_told(self, engine: int, key: PrefixKey, now: float) -> None:
        """Its first token has come, so its blocks are cached, as events will have said soon."""
        self._told.append((now + self._late_seconds, engine, cast(BlockHashes, key).hashes))

    def withdraw(self, url: str, key: PrefixKey | None = None) -> None:
        raise NotImplementedError("nothing fails here")

    def expire(self, now: float) -> None:
        """Guesses end with events."""

    def num_blocks(self, url: str) -> int:
        return len(self._guesses[self._numbers[url]])

    def _deepen(self, engine: int, blocks: tuple[int, ...], depth: int) -> int:
        guesses = self._guesses[engine]
        while depth < len(blocks) and (blocks[depth] in guesses or self._heard.holds(engine, blocks[depth])):
            depth += 1
        return depth

    def _forget(self, engine: int, blocks: tuple[int, ...]) -> None:
        guesses = self._guesses[engine]
        for block in blocks:
            if guesses[block] == 1:
                del guesses[block]
            else:
                guesses[block] -= 1


class Kvasir:
    """One router. `bound_seconds`: while every engine's prefill queue is longer, requests wait here."""

    def __init__(self, world: World, policy: Policy, index: PrefixIndex, bound_seconds: float = inf) -> None:
        self.world = world
        self.index = index
        self._policy = policy
        self._bound_seconds = bound_seconds
        self._fleet = FleetPrefill()
        self._registry = Registry(
            lambda: EndpointLoad(_MAX_IN_FLIGHT, self._fleet.new_member()), on_change=lambda: None, own_models={"m"}
        )
        self._registry.set_addresses({Address(url) for url in urls_of(world)}, EndpointState.READY)
        self._ledger = Ledger(on_room=lambda: None)
        self._numbers = {url: number for number, url in enumerate(urls_of(world))}
        self.endpoints = sorted(self._registry.serving("m"), key=lambda endpoint: self._numbers[endpoint.url])
        self._tickets: dict[int, Ticket] = {}
        self._tidy_at = 0.0

    def pick(self, job: Job, now: float) -> int | None:
        self.hear(now)
        self._tidy(now)
        open_ones = [endpoint for endpoint in self.endpoints if endpoint.has_room]
        if not open_ones or not self._has_short_queue(now):
            return None
        request, prefix = job.request, job.request.prefix
        assert prefix is not None
        placement = self._policy.place(request, open_ones, self.index.match(prefix, now), now)
        endpoint = placement.leg.endpoint
        (self._tickets[job.number],) = self._ledger.dispatch(request, placement, now)
        self.index.insert(endpoint.url, prefix, now, endpoint.load.kv_capacity_tokens)
        return self._numbers[endpoint.url]

    def hear(self, now: float) -> None:
        """Whatever has come in since."""

    def first_token(self, job: Job, now: float) -> None:
        self._tickets[job.number].first_token(now)

    def finish(self, job: Job, now: float) -> None:
        self._tickets.pop(job.number).finish()

    def retry_at(self, now: float) -> float:
        shortest = min(endpoint.load.queue_seconds(now) for endpoint in self.endpoints)
        return now + max(shortest - self._bound_seconds, _LEAST_RETRY_SECONDS)

    def _has_short_queue(self, now: float) -> bool:
        if self._bound_seconds == inf:
            return True
        return any(endpoint.load.queue_seconds(now) <= self._bound_seconds for endpoint in self.endpoints)

    def _tidy(self, now: float) -> None:
        if now < self._tidy_at:
            return
        self._tidy_at = now + _TIDY_SECONDS
        self._fleet.refresh(now)
        for endpoint in self.endpoints:
            endpoint.load.expire(now)


class HeardKvasir(Kvasir):
    def __init__(self, world: World, policy: Policy, heard: LateBlockMap, bound_seconds: float = inf) -> None:
        index = HeardIndex(urls_of(world), heard, world.late_seconds, world.block_tokens)
        super().__init__(world, policy, index, bound_seconds)
        self._heard_index = index
        self._num_heard = 0

    def hear(self, now: float) -> None:
        reports, heard = self.world.reports, self._num_heard
        while heard < len(reports) and reports[heard].at <= now:
            self.endpoints[reports[heard].engine].load.report(reports[heard].report, reports[heard].at)
            heard += 1
        self._num_heard = heard

    def first_token(self, job: Job, now: float) -> None:
        super().first_token(job, now)
        assert job.request.prefix is not None
        self._heard_index.is_told(job.engine, job.request.prefix, now)


class ExactKvasir(HeardKvasir):
    """Not late at all, and reports at each pick."""

    def __init__(self, world: World, policy: Policy, heard: LateBlockMap, bound_seconds: float = inf) -> None:
        super().__init__(world, policy, heard, bound_seconds)
        self._sent: list[list[str]] = [[] for _ in world.engines]

    def pick(self, job: Job, now: float) -> int | None:
        engine = super().pick(job, now)
        if engine is not None:
            self._sent[engine].append(job.request_id)
        return engine

    def hear(self, now: float) -> None:
        for engine, endpoint, sent in zip(self.world.engines, self.endpoints, self._sent, strict=True):
            endpoint.load.report(report_of(engine, tuple(sent), now), now)
            sent.clear()


class ApproximateKvasir(Kvasir):
    """Every router for itself; what others do it sees in engines' metrics only."""

    def __init__(self, world: World, policy: Policy, bound_seconds: float = inf) -> None:
        index = ApproximatePrefixIndex(32768, 1200.0, world.block_tokens, 4.0)
        super().__init__(world, policy, index, bound_seconds)
        self._scraped_at = -inf

    def hear(self, now: float) -> None:
        if now < self._scraped_at + _SCRAPE_SECONDS:
            return
        self._scraped_at = now
        for engine, endpoint in zip(self.world.engines, self.endpoints, strict=True):
            _scrape(engine, endpoint, now)


def _scrape(engine: Engine, endpoint: Endpoint, now: float) -> None:
    endpoint.load.scraped(engine.kv_usage, engine.model.kv_capacity_tokens, len(engine.waiting), now)


def urls_of(world: World) -> list[str]:
    return [f"http://{number}:8000" for number in range(len(world.engines))]
