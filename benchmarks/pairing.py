"""What pairing prefill and decode by cost gains over always one or the other, in virtual time.

    python -m benchmarks.pairing --trace documents --prefills 2 --decodes 6 --speed 0.5 1 1.5

places a trace that benchmarks.routing takes by the router's own picker, costs, ledger, index and transfer times, on the
engines of benchmarks.routing. `local`: decode engines prefill for themselves; `remote`: never; `auto`: by
cost. Prints seconds to the first token, and between tokens, of which a prefill on the same engine takes its part.

    python -m benchmarks.pairing --trace FILE --prefills 4 --decodes 4 --exchange nobody prefills all

compares who fetches prefixes from whom, as a router places that hears from engines what they have cached; of prompts
that go on from an answer (routing/answers.py) that is on the engine which decoded it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from statistics import fmean
from typing import Literal, get_args

from benchmarks.routing.__main__ import load
from benchmarks.routing.answers import answers_of
from benchmarks.routing.blocks import LateBlockMap
from benchmarks.routing.engine import CacheUpdate, Engine, EngineModel
from benchmarks.routing.job import Job, request_of
from benchmarks.routing.kvasir import HeardIndex
from benchmarks.routing.simulation import quantile
from benchmarks.routing.trace import Trace, TraceRequest

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.placement.pairing import Pairing
from kvasir_router.placement.placement import Fetch
from kvasir_router.placement.prefix_fetching import PrefixFetching
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

MIN_TOKENS: dict[str, int | None] = {"local": 10**9, "remote": 0, "auto": None}
_HEAD = "| speed | prefill | exchanging | remote | fetched | TTFT mean, s | p50 | p99 | between tokens mean, ms | p99 |"
_TIDY_SECONDS = 10.0
_LATE_SECONDS = 0.05  # that KV events come after what they tell
_KV_TRANSFER_PORT = 5600

Exchanging = Literal["nobody", "prefills", "all"]
"""Which engines fetch prefixes that others of them have cached."""
_ROLES: dict[Exchanging | None, Set[Role]] = {
    None: frozenset(),
    "nobody": frozenset(),
    "prefills": frozenset({Role.PREFILL}),
    "all": frozenset({Role.PREFILL, Role.DECODE}),
}


@dataclass(frozen=True, slots=True)
class Setting:
    num_prefills: int
    num_decodes: int
    speed: float = 1.0
    tokens_per_second: float = 100_000.0  # that a transfer moves
    latency_seconds: float = 0.005
    model: EngineModel = field(default_factory=EngineModel)
    exchanging: Exchanging | None = None  # None: nobody; and the router guesses caches, which it else hears of


@dataclass(frozen=True, slots=True)
class Outcome:
    first_token_seconds: tuple[float, ...]  # ascending
    token_seconds: tuple[float, ...]  # each request's mean, ascending
    remote_share: float
    fetched_share: float  # of prompt tokens

    @property
    def mean(self) -> float:
        return fmean(self.first_token_seconds)


class DecodeEngine(Engine):
    """It may take over a prompt that was computed elsewhere. `answers`: by job, the blocks that its answer fills."""

    def __init__(
        self,
        number: int,
        model: EngineModel,
        block_tokens: int,
        updates: list[CacheUpdate],
        answers: Mapping[int, tuple[int, ...]],
    ) -> None:
        super().__init__(number, model, block_tokens, updates)
        self._answers = answers

    def receive(self, job: Job, now: float) -> None:
        self._advance(now)
        if not self._allocate(job):
            raise RuntimeError(f"engine {self.number} has no KV left; the trace is more than the fleet can do")
        self._updates.append(CacheUpdate(now, self.number, job.blocks[job.num_cached_blocks :], ()))
        job.first_token_at = now + self.model.decode_step_seconds
        self._decode_kv_tokens += job.num_kv_tokens
        heappush(self._decodes, (self._steps + job.num_output_tokens, job.number, job))
        self._set_speeds()

    def _end(self, job: Job) -> None:
        if job.num_output_tokens > 1 and (blocks := self._answers.get(job.number)):
            self.land(blocks, self._now)
        super()._end(job)


@dataclass(slots=True)
class _Request:
    traced: TraceRequest
    decode: Job
    prefill: Job  # one token of output
    arrived: float
    tickets: tuple[Ticket, ...] = ()
    prefilled_at: float = 0.0
    num_received: int = 0
    fetch: Fetch | None = None
    ended_at: float = 0.0


class _Simulation:
    """A router and its engines. One calendar; engines' events that have been overtaken are passed over."""

    def __init__(self, trace: Trace, setting: Setting, min_tokens: int | None) -> None:
        self._setting = setting
        self._updates: list[CacheUpdate] = []
        prefills = [Address(f"p{number}", role=Role.PREFILL) for number in range(setting.num_prefills)]
        decodes = [Address(f"d{number}", role=Role.DECODE) for number in range(setting.num_decodes)]
        answers = {} if setting.exchanging is None else answers_of(trace)
        self._engines = {
            address.url: DecodeEngine(number, setting.model, trace.block_tokens, self._updates, answers)
            for number, address in enumerate((*prefills, *decodes))
        }
        self._fleet = FleetPrefill()
        self._registry = Registry(lambda: EndpointLoad(512, self._fleet.new_member()), lambda: None, {"m"})
        self._registry.set_addresses({*prefills, *decodes}, EndpointState.READY)
        self._pairing = Pairing(min_tokens)
        self._fetching = PrefixFetching()
        self._picker = Picker(FinishTime(), pairing=self._pairing, fetching=self._fetching)
        self._ledger = Ledger(lambda: None)
        self._index = self._new_index(trace.block_tokens)
        self._exchange_kv()
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._requests: dict[str, _Request] = {}
        self._tidy_at = 0.0
        self.num_fetched_tokens = 0

    def _new_index(self, block_tokens: int) -> ApproximatePrefixIndex | HeardIndex:
        if self._setting.exchanging is None:
            return ApproximatePrefixIndex(32768, 1200.0, block_tokens, 4.0)
        heard = LateBlockMap(len(self._engines), self._updates, _LATE_SECONDS)
        return HeardIndex(list(self._engines), heard, _LATE_SECONDS, block_tokens)

    def _exchange_kv(self) -> None:
        """Its port makes an engine one that may be asked, and told to ask."""
        for endpoint in self._registry:
            if endpoint.role in _ROLES[self._setting.exchanging]:
                endpoint.load.kv_transfer_port = _KV_TRANSFER_PORT

    def run(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            self._requests[request.decode.request_id] = request
            self._at(request.arrived, lambda now, request=request: self._place(request, now))  # type: ignore[misc]
        while self._calendar:
            at, _, happen = heappop(self._calendar)
            happen(at)

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        self._num_events += 1
        heappush(self._calendar, (at, self._num_events, happen))

    def _place(self, request: _Request, now: float) -> None:
        self._tidy(now)
        asked, prefix = request.decode.request, request.decode.request.prefix
        assert prefix is not None
        placement = self._picker.pick(
            asked,
            self._registry.serving("m"),
            self._index.match(prefix, now),
            now,
            prefills=self._registry.prefilling("m"),
            written=partial(self._index.written, prefix),
        )
        assert placement is not None, "an engine has 512 requests in flight: the trace is more than the fleet can do"
        request.tickets = self._ledger.dispatch(asked, placement, now)
        request.num_received = placement.leg.received_tokens
        for leg in placement.legs:
            self._index.insert(leg.endpoint.url, prefix, now, None)
        url = (placement.prefill or placement.leg).endpoint.url
        job = request.decode if placement.prefill is None else request.prefill
        request.fetch = placement.fetch
        if placement.fetch is None or not self._fetch(url, job, placement.fetch.peer_url, now):
            self._submit(url, job, now)

    def _fetch(self, url: str, job: Job, peer_url: str, now: float) -> bool:
        """Whether the job waits for what the peer has."""
        engine = self._engines[url]
        blocks, seconds = engine.to_fetch(job, self._engines[peer_url])
        if not blocks:
            return False

        def land(at: float) -> None:
            num_before = engine.cached_tokens(job)
            engine.land(blocks, at)
            self.num_fetched_tokens += engine.cached_tokens(job) - num_before
            self._submit(url, job, at)

        self._at(now + seconds, land)
        return True

    def _submit(self, url: str, job: Job, now: float) -> None:
        self._engines[url].submit(job, now)
        self._changed(url, now)

    def _changed(self, url: str, now: float) -> None:
        engine = self._engines[url]
        engine.event_at = engine.next_event()
        if engine.event_at < inf:
            self._at(max(engine.event_at, now), lambda at: self._proceed(url, at))

    def _proceed(self, url: str, now: float) -> None:
        engine = self._engines[url]
        if now < engine.event_at:
            return
        engine.proceed(now)
        first_tokens, finished = engine.first_tokens, engine.finished
        engine.first_tokens, engine.finished = [], []
        for job in first_tokens:
            self._first_token(self._requests[job.request_id], job, now)
        for job in finished:
            self._end(self._requests[job.request_id], job, now)
        self._changed(url, now)

    def _first_token(self, request: _Request, job: Job, now: float) -> None:
        ticket = request.tickets[-1]
        self._is_told(ticket.url, job, now)
        if request.fetch is not None:
            self._fetching.learn(request.fetch, ticket.url, ticket.seconds_late(now), now)
        if job is request.decode:
            ticket.first_token(now)
            return
        prefill_seconds = now - request.arrived
        request.prefilled_at = now
        ticket.whole_answer(now)
        self._at(now + self._exposed_seconds(request, prefill_seconds), lambda at: self._receive(request, at))

    def _is_told(self, url: str, job: Job, now: float) -> None:
        if isinstance(self._index, HeardIndex):
            assert job.request.prefix is not None
            self._index.is_told(self._engines[url].number, job.request.prefix, now)

    def _exposed_seconds(self, request: _Request, prefill_seconds: float) -> float:
        """Of a transfer that begins with the first chunk and goes on beside prefill."""
        setting = self._setting
        in_all = request.num_received / setting.tokens_per_second
        last_chunk = min(request.num_received, setting.model.chunk_tokens) / setting.tokens_per_second
        return setting.latency_seconds + max(in_all - prefill_seconds, last_chunk)

    def _receive(self, request: _Request, now: float) -> None:
        decode, prefill = request.tickets
        prefill.finish()
        self._engines[decode.url].receive(request.decode, now)
        self._is_told(decode.url, request.decode, now)
        self._at(request.decode.first_token_at, lambda at: self._has_begun(request, at))
        self._changed(decode.url, now)

    def _has_begun(self, request: _Request, now: float) -> None:
        decode, prefill = request.tickets
        decode.first_token(now)
        seconds = now - request.prefilled_at
        self._pairing.transfers.observe(prefill.url, decode.url, request.num_received, seconds, now)

    def _end(self, request: _Request, job: Job, now: float) -> None:
        if job is request.decode:
            request.ended_at = now
            request.tickets[0].finish()

    def _tidy(self, now: float) -> None:
        if now >= self._tidy_at:
            self._tidy_at = now + _TIDY_SECONDS
            self._fleet.refresh(now)
            self._pairing.transfers.refresh(self._registry.urls(), now)
            self._fetching.transfers.refresh(self._registry.urls(), now)


def simulate(trace: Trace, setting: Setting, min_tokens: int | None) -> Outcome:
    requests = [_request(number, traced, trace, setting) for number, traced in enumerate(trace.requests)]
    simulation = _Simulation(trace, setting, min_tokens)
    simulation.run(requests)
    return Outcome(
        first_token_seconds=tuple(sorted(request.decode.first_token_at - request.arrived for request in requests)),
        token_seconds=tuple(
            sorted(
                (request.ended_at - request.decode.first_token_at) / (request.traced.num_output_tokens - 1)
                for request in requests
                if request.traced.num_output_tokens > 1
            )
        ),
        remote_share=fmean(len(request.tickets) - 1 for request in requests),
        fetched_share=simulation.num_fetched_tokens / sum(traced.num_input_tokens for traced in trace.requests),
    )


def _request(number: int, traced: TraceRequest, trace: Trace, setting: Setting) -> _Request:
    asked = request_of(number, traced, trace.block_tokens, can_transfer_kv=True)
    arrived = traced.arrived / setting.speed
    decode = Job(number, traced, arrived, asked, 0)
    prefill = Job(number, replace(traced, num_output_tokens=1), arrived, asked, 0)
    return _Request(traced, decode, prefill, arrived)


def main() -> None:
    arguments = _parser().parse_args()
    trace = load(arguments.trace, arguments.seed)
    print(
        f"{trace.name}: {len(trace.requests)} requests, {arguments.prefills} prefill and {arguments.decodes} decode\n"
    )
    print(_HEAD + "\n" + "|---" * _HEAD.count(" | ") + "|---|", flush=True)
    for speed in arguments.speed:
        for exchanging in arguments.exchange or (None,):
            setting = Setting(
                arguments.prefills,
                arguments.decodes,
                speed,
                arguments.transfer_rate,
                model=EngineModel(fetch_tokens_per_second=arguments.fetch_rate),
                exchanging=exchanging,
            )
            for name in arguments.prefill:
                print(_row(setting, name, simulate(trace, setting, MIN_TOKENS[name])), flush=True)


def _row(setting: Setting, name: str, found: Outcome) -> str:
    return (
        f"| {setting.speed:g} | {name} | {setting.exchanging or ''} | {found.remote_share:.2f} "
        f"| {found.fetched_share:.3f} | {found.mean:.3f} | {quantile(found.first_token_seconds, 0.5):.3f} "
        f"| {quantile(found.first_token_seconds, 0.99):.3f} "
        f"| {1000 * fmean(found.token_seconds):.1f} | {1000 * quantile(found.token_seconds, 0.99):.1f} |"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True, help="FILE, agents, chats, documents or azure:FILE")
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0], help="times the trace's own")
    parser.add_argument("--prefills", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=6)
    parser.add_argument("--transfer-rate", type=float, default=Setting(0, 0).tokens_per_second, help="tokens/s")
    parser.add_argument("--prefill", nargs="+", choices=list(MIN_TOKENS), default=list(MIN_TOKENS))
    parser.add_argument(
        "--exchange",
        nargs="+",
        choices=get_args(Exchanging),
        help="engines that fetch cached prefixes from one another; with it the router hears what is cached",
    )
    fetch_rate = EngineModel().fetch_tokens_per_second
    parser.add_argument("--fetch-rate", type=float, default=fetch_rate, help="tokens/s from a peer")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
