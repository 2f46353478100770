"""What becomes of a decision: one move at a time, in turn, and how each ends."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.router.parts import a_request

from kvasir_router.endpoints.address import Address, Role
from kvasir_router.placement.placement import decode_leg_on
from kvasir_router.placement.rebalancing import MOVE_CRITERIA
from kvasir_router.relay.body import BodyBudget
from kvasir_router.relay.journal import Journal
from kvasir_router.service.ledger import Ledger, Ticket
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.migration import Migration
from kvasir_router.service.peer_feed import has_turn
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.rebalancing import REBALANCING_SETTINGS, Outcome, Rebalancing, RunningStream
from kvasir_router.service.registry import EndpointState, Registry
from kvasir_router.service.transfer_times import TransferTimes

pytestmark = pytest.mark.anyio
FULL, IDLE = "http://full", "http://idle"
CAPACITY = 100_000
SATURATED_SECONDS, REST_SECONDS = MOVE_CRITERIA.saturated_seconds, MOVE_CRITERIA.rest_seconds
MOVE_SECONDS, SETTLE_SECONDS = REBALANCING_SETTINGS.move_seconds, REBALANCING_SETTINGS.settle_seconds


class Router:
    """One of a service's, before the same two engines: the first is overfull, with four of its streams."""

    def __init__(self, fleet: "Fleet", name: bytes) -> None:
        self.registry = Registry(lambda: EndpointLoad(10, FleetPrefill().new_member()), lambda: None, own_models={"m"})
        self.registry.set_addresses({Address(FULL, revision="1"), Address(IDLE, revision="1")}, EndpointState.READY)
        self.ledger = Ledger(lambda: None)
        self.transfers = TransferTimes()
        self.accepts = True
        self.asked: list[tuple[str, str]] = []
        self.budget = BodyBudget(2**30)
        self.tickets: dict[RunningStream, Ticket] = {}
        self.fleet = fleet
        self.rebalancing = Rebalancing(
            self.registry,
            cast(Migration, self),
            self.transfers,
            lambda: has_turn(name, fleet.names - {name}, fleet.now),
            lambda: fleet.now,
        )
        self.streams = [self.stream(f"{name.decode()}{number}") for number in range(4)]
        self.preempted: set[RunningStream] = set()

    async def hand_over(self, url: str, request_id: str) -> bool:
        self.asked.append((url, request_id))
        return self.accepts

    def stream(self, request_id: str, num_drawn: int = 1000, **fields: Any) -> RunningStream:
        request = a_request(1000, request_id=request_id, **{"can_transfer_kv": True} | fields)
        journal = Journal(self.budget)
        journal.keep(b"[0]\n" * num_drawn)
        exchange = SimpleNamespace(journal=journal, is_held_back=False)
        stream = RunningStream(request, cast(Any, exchange))
        self.rebalancing.begin(stream, self.ticket(stream, FULL))
        return stream

    def ticket(self, stream: RunningStream, url: str) -> Ticket:
        endpoint = self.registry.get(url)
        assert endpoint is not None
        placement = SimpleNamespace(legs=(decode_leg_on(endpoint, stream.request, {}),), prefill=None)
        if (former := self.tickets.get(stream)) is not None:
            former.finish()
        (ticket,) = self.ledger.dispatch(stream.request, cast(Any, placement), self.fleet.now)
        self.tickets[stream] = ticket
        return ticket

    def hear(self, url: str, num_waiting: int, kv_used_tokens: int) -> None:
        endpoint = self.registry.get(url)
        assert endpoint is not None
        load = LoadReport(9, num_waiting, 0, 0, kv_used_tokens, CAPACITY, 20.0, None, (), "i", kv_transfer_port=5600)
        endpoint.load.report(load, self.fleet.now)

    def draw(self) -> None:
        """What runs gets a token."""
        for stream in self.tickets.keys() - self.preempted:
            if (journal := stream.exchange.journal) is not None:
                journal.keep(b"[0]\n")

    async def arrive(self, stream: RunningStream, url: str = IDLE) -> None:
        """It is let go of, and goes on there."""
        self.rebalancing.hand_over(stream)
        self.rebalancing.end(stream)
        self.rebalancing.begin(stream, self.ticket(stream, url))
        self.fleet.now += 0.01
        self.rebalancing.go_on(stream)

    @property
    def outcomes(self) -> dict[Outcome, int]:
        return {outcome: number for outcome, number in self.rebalancing.num_by_outcome.items() if number}


class Fleet:
    def __init__(self, *names: bytes) -> None:
        self.names = set(names)
        self.now = 1000.0
        self.routers = [Router(self, name) for name in names]
        self.num_waiting = 3
        self.kv_used_tokens = CAPACITY

    async def run(self, seconds: float) -> None:
        """As if a quarter of a second went by again and again."""
        for _ in range(round(seconds / 0.25)):
            for router in self.routers:
                router.hear(FULL, self.num_waiting, self.kv_used_tokens)
                router.hear(IDLE, 0, 0)
                router.draw()
            await asyncio.gather(*(router.rebalancing.step() for router in self.routers))
            self.now += 0.25


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(b"a")


@pytest.fixture
def router(fleet: Fleet) -> Router:
    return fleet.routers[0]


async def test_an_engine_is_asked_once_it_was_overfull_for_long_enough(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS)
    assert router.asked == []
    await fleet.run(0.25)
    assert router.asked == [(FULL, "a0")]


async def test_an_engine_that_has_room_in_between_is_not_overfull(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS)
    fleet.num_waiting = 0
    await fleet.run(0.25)
    fleet.num_waiting = 1
    await fleet.run(SATURATED_SECONDS)
    assert router.asked == []


@pytest.mark.parametrize(("was_full", "asks"), [(True, True), (False, False)])
async def test_an_engine_whose_preempted_requests_leave_room_is_still_overfull(
    was_full: bool, asks: bool, fleet: Fleet, router: Router
) -> None:
    fleet.kv_used_tokens = CAPACITY if was_full else CAPACITY * 3 // 4
    await fleet.run(1)
    fleet.kv_used_tokens = CAPACITY * 3 // 4
    await fleet.run(SATURATED_SECONDS)
    assert bool(router.asked) is asks


async def test_one_moves_at_a_time_and_the_next_when_both_engines_have_told(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS + 1)
    assert router.asked == [(FULL, "a0")]
    assert router.streams[0].receiver == IDLE
    await router.arrive(router.streams[0])
    assert router.streams[0].receiver is None
    await fleet.run(SETTLE_SECONDS)
    assert len(router.asked) == 1
    await fleet.run(0.25)
    assert router.asked == [(FULL, "a0"), (FULL, "a1")]
    assert router.outcomes == {Outcome.MOVED: 1}


async def test_a_stream_rests_after_a_move(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS + 0.25)
    await router.arrive(router.streams[0], FULL)
    for stream in router.streams[1:]:
        router.rebalancing.end(stream)
    await fleet.run(REST_SECONDS - 1)
    assert len(router.asked) == 1
    await fleet.run(2)
    assert router.asked == [(FULL, "a0")] * 2


async def test_a_stream_rests_after_a_handover_that_another_has_asked_for(fleet: Fleet, router: Router) -> None:
    await router.arrive(router.streams[0], FULL)
    for stream in router.streams[1:]:
        router.rebalancing.end(stream)
    await fleet.run(REST_SECONDS - 1)
    assert router.asked == []


async def test_the_journals_room_is_given_back_with_the_end_of_a_move(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS + 0.25)
    num_kept = sum(stream.exchange.journal.num_bytes for stream in router.streams if stream.exchange.journal)
    assert router.budget.num_bytes > num_kept
    await router.arrive(router.streams[0])
    assert router.budget.num_bytes == num_kept


async def test_a_stream_that_its_receiver_does_not_take_is_counted_where_it_goes_on(
    fleet: Fleet, router: Router
) -> None:
    await fleet.run(SATURATED_SECONDS + 0.25)
    await router.arrive(router.streams[0], FULL)
    assert router.outcomes == {Outcome.ELSEWHERE: 1}


async def test_what_a_move_takes_is_learned_of_the_pair(fleet: Fleet, router: Router) -> None:
    before = router.transfers.estimate_seconds(FULL, IDLE, 2000)
    await fleet.run(SATURATED_SECONDS + 0.25)
    router.rebalancing.hand_over(router.streams[0])
    router.rebalancing.begin(router.streams[0], router.ticket(router.streams[0], IDLE))
    fleet.now += 5.0
    router.rebalancing.go_on(router.streams[0])
    assert router.transfers.estimate_seconds(FULL, IDLE, 2000) > 2 * before


@pytest.mark.parametrize("accepts", [True, False])
async def test_an_engine_that_does_not_let_go_keeps_its_stream(accepts: bool, fleet: Fleet, router: Router) -> None:
    router.accepts = accepts
    await fleet.run(SATURATED_SECONDS + 0.25)
    assert router.outcomes == ({} if accepts else {Outcome.STAYED: 1})
    await fleet.run(MOVE_SECONDS + 1)
    assert router.outcomes[Outcome.STAYED] >= 1
    assert router.streams[0].receiver is None
    assert router.asked[1] == (FULL, "a1")


async def test_a_stream_that_ends_before_it_leaves_is_waited_for_no_longer(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS + 0.25)
    router.rebalancing.end(router.streams[0])
    await fleet.run(0.25)
    assert router.outcomes == {Outcome.STAYED: 1}


async def test_a_stream_that_is_preempted_stays_until_it_runs_again(fleet: Fleet, router: Router) -> None:
    router.preempted = set(router.streams)
    await fleet.run(SATURATED_SECONDS + 2)
    assert router.asked == []
    router.preempted.remove(router.streams[2])
    await fleet.run(0.25)
    assert router.asked == [(FULL, "a2")]


async def test_a_client_that_leaves_meanwhile_does_not_stop_others_for_ever(fleet: Fleet, router: Router) -> None:
    await fleet.run(SATURATED_SECONDS + 0.25)
    router.rebalancing.hand_over(router.streams[0])
    router.rebalancing.end(router.streams[0])
    await fleet.run(MOVE_SECONDS + 0.5)
    assert router.outcomes == {Outcome.ELSEWHERE: 1}


async def test_a_handover_that_nobody_here_has_asked_for_is_no_move(fleet: Fleet, router: Router) -> None:
    await router.arrive(router.streams[0])
    await fleet.run(0.25)
    assert router.outcomes == {}


async def test_a_stream_whose_journal_could_not_be_kept_stays(fleet: Fleet, router: Router) -> None:
    router.budget.take(2**30)
    router.budget.take_for_journal(2**27 - router.budget.num_bytes + 2**30 - 2**15)  # enough for what is drawn
    await fleet.run(SATURATED_SECONDS + 2)
    assert router.asked == []
    assert not any(stream.exchange.journal.is_given_up for stream in router.streams if stream.exchange.journal)


@pytest.mark.parametrize(("role", "asked"), [(Role.DECODE, [(FULL, "a0")]), (Role.PREFILL, [])])
async def test_streams_of_a_decode_engine_go_to_its_own_kind(
    role: Role, asked: list[tuple[str, str]], fleet: Fleet, router: Router
) -> None:
    addresses = {Address(FULL, role=Role.DECODE, revision="1"), Address(IDLE, role=role, revision="1")}
    router.registry.set_addresses(addresses, EndpointState.READY)
    await fleet.run(SATURATED_SECONDS + 0.25)
    assert router.asked == asked


def _is_held_back(router: Router) -> None:
    for stream in router.streams:
        cast(Any, stream.exchange).is_held_back = True


def _has_given_up(router: Router) -> None:
    for stream in router.streams:
        cast(Any, stream.exchange).journal.drop()


def _exchanges_nothing(router: Router) -> None:
    router.hear = lambda url, num_waiting, used: router.registry.get(url).load.report(  # type: ignore[method-assign, union-attr]
        LoadReport(9, num_waiting, 0, 0, used, CAPACITY, 20.0, None, (), "i"), router.fleet.now
    )


def _is_suspect(router: Router) -> None:
    cast(Any, router.registry.get(IDLE)).suspect_until = 1e9


def _has_no_place(router: Router) -> None:
    cast(Any, router.registry.get(IDLE)).load.max_in_flight = 0


def _is_not_ready(router: Router) -> None:
    router.registry.set_state(IDLE, EndpointState.NOT_READY)


@pytest.mark.parametrize(
    "change", [_is_held_back, _has_given_up, _exchanges_nothing, _is_suspect, _has_no_place, _is_not_ready]
)
async def test_what_could_not_go_on_or_be_received_stays(
    change: Callable[[Router], None], fleet: Fleet, router: Router
) -> None:
    change(router)
    await fleet.run(SATURATED_SECONDS + 2)
    assert router.asked == []


@pytest.mark.parametrize(
    "fields",
    [{"can_transfer_kv": False}, {"is_stream": False}, {"request_id": "x" * 257}, {"model": "adapter"}],
    ids=["several", "whole", "long id", "model"],
)
async def test_what_no_engine_could_hand_over_stays(fields: dict[str, Any], fleet: Fleet, router: Router) -> None:
    for stream in router.streams:
        router.rebalancing.end(stream)
    router.stream(**{"request_id": "other"} | fields)
    await fleet.run(SATURATED_SECONDS + 2)
    assert router.asked == []


async def test_one_of_two_streams_of_one_id_can_be_named(fleet: Fleet, router: Router) -> None:
    for stream in router.streams[1:]:
        router.rebalancing.end(stream)
    twin = router.stream("a0", num_drawn=2000)  # which would be chosen first
    await fleet.run(SATURATED_SECONDS + 0.25)
    assert (router.streams[0].receiver, twin.receiver) == (IDLE, None)


async def test_routers_that_see_the_same_do_not_act_at_once() -> None:
    """Each in its turn; who has seen another's stream arrive counts it."""
    fleet = Fleet(b"a", b"b", b"c")
    num_at_once = []
    for _ in range(80):
        before = [len(router.asked) for router in fleet.routers]
        await fleet.run(0.25)
        acting = [len(router.asked) > num for router, num in zip(fleet.routers, before, strict=True)]
        num_at_once.append(sum(acting))
        for router in fleet.routers:
            for stream in router.streams:
                if stream.receiver is not None:
                    await router.arrive(stream)
    assert max(num_at_once) == 1
    assert all(router.outcomes[Outcome.MOVED] > 1 for router in fleet.routers)
