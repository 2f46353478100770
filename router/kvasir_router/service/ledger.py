"""Which requests are in flight where: a ticket for each leg of a placement, counted from its dispatch to its end."""

from collections.abc import Callable
from dataclasses import replace

from kvasir_router.placement.placement import Leg, Placement
from kvasir_router.request import InferenceRequest
from kvasir_router.service.load import InFlight


class Ticket:
    """One leg's share of an endpoint's load. Every step may be repeated; only the first call counts.

    `on_interrupt`, set by whoever waits for the answer, is called when the endpoint is found to answer no more.
    """

    def __init__(
        self,
        leg: Leg,
        request: InferenceRequest,
        num_output_tokens: int,
        now: float,
        *,
        on_prefilled: Callable[[], None],
        on_finish: Callable[["Ticket"], None],
    ) -> None:
        self.url = leg.endpoint.url
        self.request_id = request.request_id
        self.on_interrupt: Callable[[], None] = _do_nothing
        self._load = leg.endpoint.load
        self._on_prefilled = on_prefilled
        self._on_finish = on_finish
        self._request = InFlight(
            request.request_id, leg.cached_tokens, leg.uncached_tokens, num_output_tokens, leg.received_tokens
        )
        self._is_prefilling = True
        self._is_finished = False
        self._load.begin(self._request, now)

    @property
    def expected_prefill_seconds(self) -> float:
        return self._load.prefill.estimate_seconds(self._request.work_ahead)

    @property
    def is_engine_prefilling(self) -> bool:
        """Any request's prompt."""
        return self._load.is_prefilling

    def first_token(self, now: float, num_generated_tokens: int = 0) -> None:
        """Its prefill is over, and how long it took is one observation of the rate. Where it goes on with a stream that
        another engine has begun, the tokens generated there were computed again.
        """
        if self._is_prefilling and self._request.uncached_tokens:
            work = self._request.work_ahead + num_generated_tokens
            self._load.prefill.observe(work, now - self._request.measured_from, now)
        self._end_prefill(now)

    def release_prefill(self) -> None:
        """It is taken to be over, as nothing will tell: the first byte comes with the last."""
        self._end_prefill(None)

    def prefill_after_all(self, now: float) -> None:
        """The other leg has failed, so that the engine computes what it should have received."""
        if self._is_prefilling and self._request.received_tokens:
            self._load.prefill_after_all(self._request, now)

    def whole_answer(self, now: float) -> None:
        """It comes in one piece: its prefill took as long where nothing is decoded, else no longer."""
        if not self._request.num_output_tokens:
            self.first_token(now)
        elif self._request.uncached_tokens:
            self._load.prefill.observe_at_most(self._request.work_ahead, now - self._request.measured_from, now)

    def finish(self) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        self._is_prefilling = False
        self._load.end(self._request)
        self._on_finish(self)

    def _end_prefill(self, now: float | None) -> None:
        if self._is_prefilling:
            self._is_prefilling = False
            self._load.end_prefill(self._request, now)
            self._on_prefilled()


def _do_nothing() -> None:
    """A request that nobody can interrupt."""


class Ledger:
    """`on_room` is called whenever an endpoint may take one more request."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self._on_room = on_room
        self._tickets: dict[str, dict[str, Ticket]] = {}  # by the endpoint's url, and the request's id there
        self._num_dispatches = 0

    def dispatch(self, request: InferenceRequest, placement: Placement, now: float) -> tuple[Ticket, ...]:
        """A ticket for each of the placement's legs, in their order."""
        self._num_dispatches += 1
        return tuple(self._ticket(leg, request, placement, now) for leg in placement.legs)

    def interrupt(self, url: str) -> None:
        """Tells the requests in flight there, known endpoint or gone, that no answer will come."""
        for ticket in tuple(self._tickets.get(url, {}).values()):
            ticket.on_interrupt()

    def has_in_flight(self, url: str) -> bool:
        return url in self._tickets

    def num_in_flight(self, url: str) -> int:
        return len(self._tickets.get(url, ()))

    def _ticket(self, leg: Leg, request: InferenceRequest, placement: Placement, now: float) -> Ticket:
        num_output_tokens = 0 if leg is placement.prefill else request.num_output_tokens
        tickets = self._tickets.setdefault(leg.endpoint.url, {})
        if request.request_id in tickets:  # clients choose ids, and may choose one twice; no header has a newline
            request = replace(request, request_id=f"{request.request_id}\n{self._num_dispatches}")
        leg.endpoint.load.last_dispatch = self._num_dispatches
        ticket = Ticket(leg, request, num_output_tokens, now, on_prefilled=self._on_room, on_finish=self._finished)
        tickets[ticket.request_id] = ticket
        return ticket

    def _finished(self, ticket: Ticket) -> None:
        remaining = self._tickets[ticket.url]
        del remaining[ticket.request_id]
        if not remaining:
            del self._tickets[ticket.url]
        self._on_room()
