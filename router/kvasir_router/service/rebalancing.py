"""Has overfull engines hand streams of this router over to idle ones, one at a time, each in the service's turn.

`placement/rebalancing.py` decides. Here is what it is told, the one move under way, and how that ends. The engine ends
the stream as one that drains does, and it goes on in the same way, so whatever fails costs a recomputation and no
token. Nothing happens unless `step` is called.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvasir_router.placement import rebalancing
from kvasir_router.placement.rebalancing import MOVE_CRITERIA, EngineView, Move, MoveCriteria, StreamView
from kvasir_router.relay.exchange import Exchange
from kvasir_router.request import InferenceRequest
from kvasir_router.service.ledger import MAX_NAMED_LENGTH, Ticket
from kvasir_router.service.migration import Migration
from kvasir_router.service.registry import Endpoint, Registry
from kvasir_router.service.transfer_times import TransferTimes

_ROOM_TO_MOVE_BYTES = 2**16
"""Of the journal, for what an engine still writes before it lets go."""


@dataclass(frozen=True)
class RebalancingSettings:
    step_seconds: float = 0.25
    """Between two steps."""
    move_seconds: float = 10.0
    """After so long a move is not waited for any more; wherever its stream goes on is as good."""
    settle_seconds: float = 0.5
    """Until both engines have told of a move."""
    criteria: MoveCriteria = MOVE_CRITERIA


REBALANCING_SETTINGS = RebalancingSettings()


class Outcome(StrEnum):
    MOVED = "moved"
    ELSEWHERE = "elsewhere"  # let go of, and not taken by whom it was meant for
    STAYED = "stayed"  # it ended before, or its engine did not let go


class RunningStream:
    """A request's answer, wherever it runs."""

    __slots__ = (
        "begun_at", "drawn_at", "exchange", "moved_at", "num_seen_tokens", "receiver", "request", "request_id", "url",
    )  # fmt: skip

    def __init__(self, request: InferenceRequest, exchange: Exchange) -> None:
        self.request = request
        self.exchange = exchange
        self.url = ""
        self.request_id = ""  # as engines know it
        self.begun_at = 0.0  # at `url`
        self.drawn_at = 0.0  # when it was last seen to have got a token, or begun
        self.num_seen_tokens = 0  # by then
        self.moved_at = -math.inf  # or asked to be
        self.receiver: str | None = None  # where it is to go on; None: wherever there is room

    @property
    def num_drawn_tokens(self) -> int:
        journal = self.exchange.journal
        return 0 if journal is None else journal.num_events

    def look(self, now: float) -> None:
        """To be called with every step."""
        if self.num_drawn_tokens != self.num_seen_tokens:
            self.num_seen_tokens, self.drawn_at = self.num_drawn_tokens, now


@dataclass(slots=True, eq=False)
class _UnderWay:
    move: Move
    stream: RunningStream
    asked_at: float
    is_handed_over: bool = False


class Rebalancing:
    """Of one service. `has_turn`: whether this of its routers may act now."""

    def __init__(
        self,
        registry: Registry,
        migration: Migration,
        transfers: TransferTimes,
        has_turn: Callable[[], bool],
        clock: Callable[[], float],
        settings: RebalancingSettings = REBALANCING_SETTINGS,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._migration = migration
        self._transfers = transfers
        self._has_turn = has_turn
        self._clock = clock
        self._streams: dict[RunningStream, None] = {}  # that an engine could hand over
        self._saturated_since: dict[str, float] = {}
        self._under_way: _UnderWay | None = None
        self._rests_until = -math.inf
        self.num_by_outcome = dict.fromkeys(Outcome, 0)

    @property
    def num_streams(self) -> int:
        """That an engine could hand over."""
        return len(self._streams)

    def begin(self, stream: RunningStream, ticket: Ticket) -> None:
        """It is dispatched. One whose id another has there, too, stays."""
        stream.url, stream.request_id = ticket.url, ticket.request_id
        stream.begun_at = stream.drawn_at = self._clock()
        request = stream.request
        is_named = ticket.request_id == request.request_id and len(request.request_id) <= MAX_NAMED_LENGTH
        if request.can_transfer_kv and request.is_resumable and is_named:
            self._streams[stream] = None

    def end(self, stream: RunningStream) -> None:
        """At this engine."""
        self._streams.pop(stream, None)

    def hand_over(self, stream: RunningStream) -> None:
        """Its engine has let go of it, asked by this or by whom else."""
        stream.moved_at = self._clock()
        if self._under_way is not None and self._under_way.stream is stream:
            self._under_way.is_handed_over = True

    def go_on(self, stream: RunningStream) -> None:
        """The first bytes have come from where it is now."""
        under_way = self._under_way
        if under_way is None or under_way.stream is not stream or not under_way.is_handed_over:
            return
        is_there = stream.url == under_way.move.receiver
        if is_there:
            now, num_tokens = self._clock(), stream.request.num_prompt_tokens + stream.num_drawn_tokens
            self._transfers.observe(under_way.move.source, stream.url, num_tokens, now - stream.begun_at, now)
        self._settle(under_way, Outcome.MOVED if is_there else Outcome.ELSEWHERE)

    async def step(self) -> None:
        """To be called every `step_seconds`; waits for the engine's answer at most."""
        now = self._clock()
        self._look_at_engines(now)
        for stream in self._streams:
            stream.look(now)
        if self._under_way is not None:
            self._give_up_when_late(self._under_way, now)
        elif now >= self._rests_until and self._has_turn() and (move := self._choose(now)) is not None:
            await self._ask(*move, now)

    def _look_at_engines(self, now: float) -> None:
        before = self._saturated_since
        self._saturated_since = {
            endpoint.url: before.get(endpoint.url, now)
            for endpoint in self._registry
            if (report := endpoint.load.told) is not None
            and rebalancing.is_saturated(
                report.kv_used_tokens,
                report.kv_capacity_tokens,
                report.num_waiting,
                was_saturated=endpoint.url in before,
            )
        }

    def _give_up_when_late(self, under_way: _UnderWay, now: float) -> None:
        has_ended = under_way.stream not in self._streams and not under_way.is_handed_over
        if has_ended or now - under_way.asked_at > self._settings.move_seconds:
            self._settle(under_way, Outcome.ELSEWHERE if under_way.is_handed_over else Outcome.STAYED)

    def _choose(self, now: float) -> tuple[Move, RunningStream] | None:
        if not self._saturated_since:
            return None
        streams = {number: stream for number, stream in enumerate(self._streams) if self._could_leave(stream)}
        for model in dict.fromkeys(stream.request.model for stream in streams.values()):
            engines = [view for each in self._registry.serving(model) if (view := self._view(each, now)) is not None]
            views = [_view_of(number, each, now) for number, each in streams.items() if each.request.model == model]
            move = rebalancing.choose(engines, views, self._transfers.estimate_seconds, self._settings.criteria)
            if move is not None:
                return move, streams[move.number]
        return None

    def _could_leave(self, stream: RunningStream) -> bool:
        """What its client reads slowly would not be seen to leave."""
        journal = stream.exchange.journal
        has_journal = journal is not None and not journal.is_given_up
        return stream.url in self._saturated_since and has_journal and not stream.exchange.is_held_back

    def _view(self, endpoint: Endpoint, now: float) -> EngineView | None:
        """None of one that does not exchange KV, or does not tell."""
        load = endpoint.load
        if load.told is None or load.kv_transfer_port is None or not load.told.kv_capacity_tokens:
            return None
        return EngineView(
            url=endpoint.url,
            revision=endpoint.revision,
            num_waiting=load.told.num_waiting,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.told.kv_capacity_tokens,
            steps_per_second=load.told.steps_per_second,
            saturated_seconds=now - self._saturated_since.get(endpoint.url, now),
            can_receive=endpoint.has_room and endpoint.suspect_until <= now and not load.queue_seconds(now),
        )

    async def _ask(self, move: Move, stream: RunningStream, now: float) -> None:
        stream.moved_at = now
        journal = stream.exchange.journal
        if journal is None or not journal.reserve(_ROOM_TO_MOVE_BYTES):
            return  # it could not go on, so it stays
        stream.receiver = move.receiver
        under_way = self._under_way = _UnderWay(move, stream, now)
        accepts = await self._migration.hand_over(move.source, stream.request_id)
        if not accepts and self._under_way is under_way and not under_way.is_handed_over:
            self._settle(under_way, Outcome.STAYED)

    def _settle(self, under_way: _UnderWay, outcome: Outcome) -> None:
        self._under_way = None
        self._rests_until = self._clock() + self._settings.settle_seconds
        self.num_by_outcome[outcome] += 1
        under_way.stream.receiver = None
        if (journal := under_way.stream.exchange.journal) is not None:
            journal.release()


def _view_of(number: int, stream: RunningStream, now: float) -> StreamView:
    return StreamView(
        number=number,
        url=stream.url,
        num_prompt_tokens=stream.request.num_prompt_tokens,
        num_drawn_tokens=stream.num_drawn_tokens,
        max_output_tokens=stream.request.max_output_tokens,
        rested_seconds=now - stream.moved_at,
        silent_seconds=now - stream.drawn_at,
    )
