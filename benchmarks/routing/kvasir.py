"""Our router's own parts in virtual time: admission, loads, ledger, index and policy; only the bytes are missing.

What it knows: `heard` from KV events and load reports, both late, and its own dispatches since; `approximate` from what
it sent, and from metrics scraped once a second. Either hears its peers, unless they are told not to. Engines may fetch
prefixes from one another.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from benchmarks.routing.blocks import LateBlockMap
from benchmarks.routing.job import Job
from benchmarks.routing.rules import World

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.config import RouterConfig
from kvasir_router.endpoints.address import Address
from kvasir_router.picker import Picker
from kvasir_router.placement.costs import work_left
from kvasir_router.placement.placement import Fetch, Placement, Policy
from kvasir_router.placement.prefix_fetching import PrefixFetching
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.prefix_index.index import Held, PrefixIndex, PrefixKey
from kvasir_router.request import InferenceRequest
from kvasir_router.service.late_binding import LateBinding
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.peer_news import News
from kvasir_router.service.peers import GATHER_SECONDS, Peers
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

_DEFAULTS = RouterConfig(endpoint=("http://0:8000",))
_HOUSEKEEPING_SECONDS = 10.0  # as the server
_NO_LIMITS = QueueLimits(max_requests=10**9, max_wait_seconds=1e5)


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

    def written(self, key: PrefixKey) -> Mapping[str, Held]:
        depths = self._heard.depths(cast(BlockHashes, key).hashes)
        return {self._urls[engine]: Held(depth * self._block_tokens) for engine, depth in depths.items()}

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
    """One router: admission, late binding, picker, loads and ledger are those of the program, with its defaults.

    Only its queue is without bounds, so that every request gets an answer and rules can be compared.
    """

    def __init__(
        self, world: World, policy: Policy, index: PrefixIndex, fetching: PrefixFetching | None = None
    ) -> None:
        self.world = world
        self.index = index
        self._picker = Picker(policy, fetching=fetching)
        self._fleet = FleetPrefill()
        self._registry = Registry(
            lambda: EndpointLoad(_DEFAULTS.max_in_flight, self._fleet.new_member()),
            on_change=lambda: None,
            own_models={"m"},
        )
        urls = urls_of(world)
        self._registry.set_addresses({Address(url) for url in urls}, EndpointState.READY)
        self._numbers = {url: number for number, url in enumerate(urls)}
        self.endpoints = sorted(self._registry.serving("m"), key=lambda endpoint: self._numbers[endpoint.url])
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self.peers = Peers(
            self._registry, self._clock, lambda: self.admission.next_waiting(), lambda: self.admission.wake()
        )
        binding = LateBinding(
            self._registry, _DEFAULTS.max_prefill_queue, self._clock, num_before=self.peers.num_before
        )
        self.admission = Admission(binding.seconds_to_room, _NO_LIMITS, TenantLimits(None, None, lambda: None))
        self._ledger = Ledger(self.admission.wake, self.peers)
        self._tickets: dict[int, Ticket] = {}
        self._tidy_at = 0.0

    async def arrive(self, job: Job) -> None:
        estimate = partial(self._least_work, job.request)
        queued = QueuedRequest("m", "", job.num_input_tokens, estimate=estimate)
        placement = None
        while placement is None:
            await self.admission.admit(queued)
            placement = self._place(job.request)
        self._dispatch(job, placement)

    def first_token(self, job: Job, now: float) -> None:
        self._tickets[job.number].first_token(now)

    def finish(self, job: Job, now: float) -> None:
        self._tickets.pop(job.number).finish()

    def report(self, engine: int, report: LoadReport, now: float) -> None:
        """Not every router hears engines."""

    def every_second(self, now: float) -> None:
        if now >= self._tidy_at:
            self._tidy_at = now + _HOUSEKEEPING_SECONDS
            self._fleet.refresh(now)
            for endpoint in self.endpoints:
                endpoint.load.expire(now)
        self.admission.wake()

    def _place(self, request: InferenceRequest) -> Placement | None:
        now = self._clock()
        assert request.prefix is not None
        written = partial(self.index.written, request.prefix)
        return self._picker.pick(request, self._registry.serving("m"), self._cached(request), now, written=written)

    def _dispatch(self, job: Job, placement: Placement) -> None:
        now, endpoint = self._clock(), placement.leg.endpoint
        assert job.request.prefix is not None
        self.index.insert(endpoint.url, job.request.prefix, now, endpoint.load.kv_capacity_tokens)
        (self._tickets[job.number],) = self._ledger.dispatch(job.request, placement, now)
        self._send(job, placement, self._numbers[endpoint.url])

    def _send(self, job: Job, placement: Placement, engine: int) -> None:
        self.world.send(job, engine)

    def _least_work(self, request: InferenceRequest) -> float:
        return work_left(request.num_prompt_tokens, max(self._cached(request).values(), default=0))

    def _cached(self, request: InferenceRequest) -> Mapping[str, int]:
        assert request.prefix is not None
        return self.index.match(request.prefix, self._clock())


class HeardKvasir(Kvasir):
    """Engines tell it what they have cached and how busy they are."""

    def __init__(
        self, world: World, policy: Policy, heard: LateBlockMap, fetching: PrefixFetching | None = None
    ) -> None:
        index = HeardIndex(urls_of(world), heard, world.late_seconds, world.block_tokens)
        super().__init__(world, policy, index, fetching)
        self._heard_index = index

    def report(self, engine: int, report: LoadReport, now: float) -> None:
        self.endpoints[engine].load.report(report, now)
        self.admission.wake()

    def first_token(self, job: Job, now: float) -> None:
        super().first_token(job, now)
        assert job.request.prefix is not None
        self._heard_index.is_told(job.engine, job.request.prefix, now)


class FetchingKvasir(HeardKvasir):
    """Engines besides fetch prefixes from one another, where that is faster by their own true rates."""

    def __init__(self, world: World, policy: Policy, heard: LateBlockMap) -> None:
        self._fetching = PrefixFetching()
        super().__init__(world, policy, heard, self._fetching)
        self._fetches: dict[int, Fetch] = {}

    def first_token(self, job: Job, now: float) -> None:
        if (fetch := self._fetches.pop(job.number, None)) is not None:
            ticket = self._tickets[job.number]
            self._fetching.learn(fetch, ticket.url, ticket.seconds_late(now), now)
        super().first_token(job, now)

    def every_second(self, now: float) -> None:
        super().every_second(now)
        self._fetching.transfers.refresh(frozenset(self._numbers), now)

    def _send(self, job: Job, placement: Placement, engine: int) -> None:
        """It reaches the engine's queue once the blocks have: those that the peer has when it is asked."""
        if (fetch := placement.fetch) is None:
            self.world.send(job, engine)
            return
        self._fetches[job.number] = fetch
        receiver, peer = self.world.engines[engine], self.world.engines[self._numbers[fetch.peer_url]]
        blocks, seconds = receiver.to_fetch(job, peer)
        if not blocks:
            self.world.send(job, engine)
            return

        def land() -> None:
            receiver.land(blocks, self._clock())
            self.world.send(job, engine)

        self._loop.call_later(seconds, land)


class ApproximateKvasir(Kvasir):
    """Every router for itself; what others do it sees in engines' metrics only, scraped every second."""

    def __init__(self, world: World, policy: Policy) -> None:
        super().__init__(
            world,
            policy,
            ApproximatePrefixIndex(
                _DEFAULTS.prefix_index_size, _DEFAULTS.prefix_ttl, world.block_tokens, _DEFAULTS.bytes_per_token
            ),
        )

    def every_second(self, now: float) -> None:
        for engine, endpoint in zip(self.world.engines, self.endpoints, strict=True):
            endpoint.load.scraped(engine.kv_usage, engine.model.kv_capacity_tokens, len(engine.waiting), now)
        super().every_second(now)


def introduce(world: World, routers: Sequence[Kvasir]) -> Sequence[Kvasir]:
    """They hear each other, where the world lets them."""
    if world.peer_seconds is not None and len(routers) > 1:
        for number, router in enumerate(routers):
            others = [other.peers for other in routers if other is not router]
            router.peers.on_event = Telling(b"%d" % number, router.peers, others, world.peer_seconds).soon
    return routers


class Telling:
    """One router's news, on their way to all others; what happens meanwhile goes with them, as in the program."""

    def __init__(self, name: bytes, peers: Peers, others: Sequence[Peers], late_seconds: float) -> None:
        self._name = name
        self._peers = peers
        self._others = others
        self._late_seconds = max(late_seconds - GATHER_SECONDS, 0.0)
        self._loop = asyncio.get_running_loop()
        self._is_gathering = False
        self._sent: deque[News] = deque()

    def soon(self) -> None:
        if not self._is_gathering:
            self._is_gathering = True
            self._loop.call_later(GATHER_SECONDS, self._send)

    def _send(self) -> None:
        self._is_gathering = False
        news = self._peers.take()
        if news is not None:
            self._sent.append(news)
            self._loop.call_later(self._late_seconds, self._arrive)

    def _arrive(self) -> None:
        news = self._sent.popleft()
        for other in self._others:
            other.hear(self._name, news)


def urls_of(world: World) -> list[str]:
    return [f"http://{number}:8000" for number in range(len(world.engines))]
