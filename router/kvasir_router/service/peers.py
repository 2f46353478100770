"""One service's requests at other routers, as those tell: they count in the load as this router's own do.

A peer names each ticket as it is dispatched, prefilled and finished, and the request that it would start next. What it
has told is forgotten with it: engines' reports count its requests in any case. It knows no socket.
"""

from collections.abc import Callable

from kvasir_router.admission.queued_request import Waiting
from kvasir_router.service.ledger import MAX_NAMED_LENGTH, Ticket
from kvasir_router.service.load import InFlight
from kvasir_router.service.peer_news import Dispatched, Event, Finished, News, Prefilled
from kvasir_router.service.registry import Registry

GATHER_SECONDS = 0.001
"""What happens within goes in one message."""


class Peers:
    """`next_waiting` is of this router; `on_room` is called when an endpoint may have less ahead than before."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float],
        next_waiting: Callable[[], Waiting | None],
        on_room: Callable[[], None],
    ) -> None:
        self.on_event: Callable[[], None] = _do_nothing
        """Called when there is something to tell: `take` it soon."""
        self._registry = registry
        self._clock = clock
        self._next_waiting = next_waiting
        self._on_room = on_room
        self._events: list[Event] = []  # to be told
        self._has_told_waiting = False
        self._tickets: dict[bytes, dict[int, Ticket]] = {}  # by peer
        self._waiting: dict[bytes, tuple[float, float]] = {}  # by peer: since when, and its work

    def dispatched(self, ticket: Ticket) -> None:
        request = ticket.request
        self._tell(
            Dispatched(
                ticket.number,
                ticket.url,
                request.request_id[:MAX_NAMED_LENGTH],
                request.cached_tokens,
                request.uncached_tokens,
                request.num_output_tokens,
                request.received_tokens,
            )
        )

    def prefilled(self, ticket: Ticket, num_generated_tokens: int | None) -> None:
        self._tell(Prefilled(ticket.number, num_generated_tokens, self._clock() - ticket.request.measured_from))

    def finished(self, ticket: Ticket) -> None:
        self._tell(Finished(ticket.number))

    def take(self) -> News | None:
        """What is to be told. None: nothing."""
        waiting = self._next_waiting()
        if not self._events and waiting is None and not self._has_told_waiting:
            return None
        news = News(self._events, waiting)
        self._events, self._has_told_waiting = [], waiting is not None
        return news

    def hear(self, peer: bytes, news: News) -> None:
        now = self._clock()
        tickets = self._tickets.setdefault(peer, {})
        for event in news.events:
            if isinstance(event, Dispatched):
                self._begin(tickets, event, now)
            elif (ticket := tickets.get(event.number)) is None:
                pass  # dispatched before this router listened
            elif isinstance(event, Prefilled) and event.num_generated_tokens is not None:
                ticket.first_token(now, event.num_generated_tokens, event.seconds)
            elif isinstance(event, Prefilled):
                ticket.release_prefill()
            else:
                del tickets[event.number]
                ticket.finish()
        if news.waiting is None:
            self._waiting.pop(peer, None)
        else:
            self._waiting[peer] = (now - news.waiting.seconds, news.waiting.work)
        self._on_room()

    def forget(self, peer: bytes) -> None:
        """It is silent, or something that it told was lost."""
        self._waiting.pop(peer, None)
        for ticket in self._tickets.pop(peer, {}).values():
            ticket.finish()
        self._on_room()

    def num_before(self, response_ratio: Callable[[], float]) -> int:
        """Peers whose next request has a higher ratio than this."""
        if not self._waiting:
            return 0
        now, ratio = self._clock(), response_ratio()
        return sum(now - since > ratio * work for since, work in self._waiting.values())

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self.on_event()

    def _begin(self, tickets: dict[int, Ticket], event: Dispatched, now: float) -> None:
        endpoint = self._registry.get(event.url)
        if endpoint is None or event.number in tickets:
            return
        request = InFlight(
            event.request_id,
            event.cached_tokens,
            event.uncached_tokens,
            event.num_output_tokens,
            event.received_tokens,
            is_peers=True,
        )
        tickets[event.number] = Ticket(
            event.number, event.url, endpoint.load, request, now, on_prefilled=_is_counted, on_finish=_is_finished
        )


def _do_nothing() -> None:
    """Nobody listens yet."""


def _is_counted(ticket: Ticket, num_generated_tokens: int | None) -> None:
    """The load knows, and whoever waits is woken once for all events."""


def _is_finished(ticket: Ticket) -> None:
    """The same."""
