"""Which requests are in flight where: a ticket for each leg of a placement, counted from its dispatch to its end."""

from collections.abc import Callable
from typing import Protocol

from kvasir_router.placement.placement import Leg, Placement
from kvasir_router.request import InferenceRequest
from kvasir_router.service.load import EndpointLoad, InFlight

MAX_NAMED_LENGTH = 256
"""Of a request's id: engines remember no longer ones."""


class Ticket:
    """One leg's share of an endpoint's load. Every step may be repeated; only the first call counts.

    `on_interrupt`, set by whoever waits for the answer, is called when the endpoint is found to answer no more; with
    True where that is only concluded from its silence.
    """

    def __init__(
        self,
        number: int,
        url: str,
        load: EndpointLoad,
        request: InFlight,
        now: float,
        *,
        on_prefilled: "OnPrefilled",
        on_finish: Callable[["Ticket"], None],
    ) -> None:
        self.number = number
        self.url = url
        self.request = request
        self.on_interrupt: Callable[[bool], None] = _do_nothing
        self._load = load
        self._on_prefilled = on_prefilled
        self._on_finish = on_finish
        self._is_prefilling = True
        self._is_finished = False
        self._load.begin(self.request, now)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def can_move(self) -> bool:
        """Whether it has begun, and its engine knows it by its id."""
        return not self._is_prefilling and "\n" not in self.request_id and len(self.request_id) <= MAX_NAMED_LENGTH

    @property
    def expected_prefill_seconds(self) -> float:
        return self._load.prefill.estimate_seconds(self.request.work_ahead)

    def seconds_late(self, now: float) -> float:
        """How much later than the prefill ahead, its own included, should end."""
        return now - self.request.measured_from - self.expected_prefill_seconds

    @property
    def is_engine_prefilling(self) -> bool:
        """Any request's prompt."""
        return self._load.is_prefilling

    def first_token(self, now: float, num_generated_tokens: int = 0, seconds: float | None = None) -> None:
        """Its prefill is over, and how long it took is one observation of the rate. Where it goes on with a stream that
        another engine has begun, the tokens generated there were computed again. `seconds`: since its dispatch, where
        another has measured them. A prefill that had to wait for KV from elsewhere teaches nothing of the rate.
        """
        if self._is_prefilling and self.request.uncached_tokens and not self.request.received_tokens:
            work = self.request.work_ahead + num_generated_tokens
            measured = now - self.request.measured_from if seconds is None else seconds
            self._load.prefill.observe(work, measured, now)
        self._end_prefill(now, num_generated_tokens)

    def release_prefill(self) -> None:
        """It is taken to be over, as nothing will tell: the first byte comes with the last."""
        self._end_prefill(None)

    def prefill_after_all(self, now: float) -> None:
        """The other leg has failed, so that the engine computes what it should have received."""
        if self._is_prefilling and self.request.received_tokens:
            self._load.prefill_after_all(self.request, now)

    def whole_answer(self, now: float) -> None:
        """It comes in one piece: its prefill took as long where nothing is decoded, else no longer."""
        if not self.request.num_output_tokens:
            self.first_token(now)
        elif self.request.uncached_tokens and not self.request.received_tokens:
            self._load.prefill.observe_at_most(self.request.work_ahead, now - self.request.measured_from, now)

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        self._is_prefilling = False
        self._load.end(self.request)
        self._on_finish(self)

    def _end_prefill(self, now: float | None, num_generated_tokens: int = 0) -> None:
        if self._is_prefilling:
            self._is_prefilling = False
            self._load.end_prefill(self.request, now)
            self._on_prefilled(self, None if now is None else num_generated_tokens)


OnPrefilled = Callable[[Ticket, int | None], None]
"""(ticket, tokens generated elsewhere that were computed again; None: its first token was not seen)."""


def _do_nothing(is_silent: bool) -> None:
    """A request that nobody can interrupt."""


class LedgerListener(Protocol):
    """Is told of each ticket, after it has been counted."""

    def dispatched(self, ticket: Ticket) -> None: ...

    def prefilled(self, ticket: Ticket, num_generated_tokens: int | None) -> None: ...

    def finished(self, ticket: Ticket) -> None: ...


class Ledger:
    """`on_room` is called whenever an endpoint may take one more request."""

    def __init__(self, on_room: Callable[[], None], listener: LedgerListener | None = None) -> None:
        self._on_room = on_room
        self._listener = listener
        self._num_tickets = 0
        self._tickets: dict[str, dict[str, Ticket]] = {}  # by the endpoint's url, and the request's id there
        self._num_dispatches = 0

    def dispatch(self, request: InferenceRequest, placement: Placement, now: float) -> tuple[Ticket, ...]:
        """A ticket for each of the placement's legs, in their order."""
        self._num_dispatches += 1
        return tuple(self._ticket(leg, request, placement, now) for leg in placement.legs)

    def interrupt(self, url: str, *, is_silent: bool = False) -> None:
        """Tells the requests in flight there, known endpoint or gone, that no answer will come. `is_silent`: as far as
        its silence tells."""
        for ticket in self.tickets(url):
            ticket.on_interrupt(is_silent)

    def has_in_flight(self, url: str) -> bool:
        return url in self._tickets

    def tickets(self, url: str) -> tuple[Ticket, ...]:
        return tuple(self._tickets.get(url, {}).values())

    def _ticket(self, leg: Leg, request: InferenceRequest, placement: Placement, now: float) -> Ticket:
        num_output_tokens = 0 if leg is placement.prefill else request.num_output_tokens
        url, load, request_id = leg.endpoint.url, leg.endpoint.load, request.request_id
        tickets = self._tickets.setdefault(url, {})
        if request_id in tickets:  # clients choose ids, and may choose one twice; no header has a newline
            request_id = f"{request_id}\n{self._num_dispatches}"
        load.last_dispatch = self._num_dispatches
        in_flight = InFlight(request_id, leg.cached_tokens, leg.uncached_tokens, num_output_tokens, leg.received_tokens)
        self._num_tickets += 1
        ticket = Ticket(
            self._num_tickets, url, load, in_flight, now, on_prefilled=self._prefilled, on_finish=self._finished
        )
        tickets[request_id] = ticket
        if self._listener is not None:
            self._listener.dispatched(ticket)
        return ticket

    def _prefilled(self, ticket: Ticket, num_generated_tokens: int | None) -> None:
        if self._listener is not None:
            self._listener.prefilled(ticket, num_generated_tokens)
        self._on_room()

    def _finished(self, ticket: Ticket) -> None:
        remaining = self._tickets[ticket.url]
        del remaining[ticket.request_id]
        if not remaining:
            del self._tickets[ticket.url]
        if self._listener is not None:
            self._listener.finished(ticket)
        self._on_room()
