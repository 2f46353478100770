"""The requests that wait in front of one service's endpoints, and which of them starts next.

Streams that have to go on elsewhere come before all that have not begun, and are never refused. Among the others
tenants take turns; within a tenant priority and then the response ratio decide, never across tenants: a client names
its own priority, and must not overtake strangers by it. A request that no endpoint can take is passed over.

Invariant: a request keeps its place until it has really started, woken or not, and only one is woken at a time. So no
newcomer slips past one that is just about to start. Pure bookkeeping: no clock, no event loop.
"""

import itertools
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import log2

from kvasir_router.admission.queued_request import QueuedRequest

# What a tenant may start in one turn. A small one interleaves tenants finely, at no cost: turns in which nobody could
# start anything are passed in one step.
QUANTUM_TOKENS = 1024


# With each start, so that the work for all that wait is spread: what is cached changes while they do.
_ESTIMATES_A_START = 8


# Requests of one size differ by at most a twelfth in their work, and so in their ratio once they have waited alike.
_SIZES_PER_DOUBLING = 8

_Place = tuple[int, int, QueuedRequest]  # priority and number of the arrival, of which no two are equal
_SizePlace = tuple[float, int, QueuedRequest]  # moment and number of the arrival


def _place(request: QueuedRequest) -> _Place:
    return (request.rank, request.number, request)


def _size_place(request: QueuedRequest) -> _SizePlace:
    return (request.arrived, request.number, request)


def _size(request: QueuedRequest) -> int:
    return int(_SIZES_PER_DOUBLING * log2(request.counted_work))


class Line:
    """Of one tenant and model. The next is the one with the highest response ratio (Brinch Hansen 1971) of the most
    pressing: short ones, as those are whose prefix is cached, overtake long ones, and none starves.

    Ratios grow at different speeds, so no order by them can be kept. But of requests of the same work the earliest has
    the highest: only one of each size is looked at, about a hundred however many wait.

    Keeps sorted lists: to move the tail of ten thousand entries costs less than the steps of a heap.

    What a request says of its work may change by `estimated` only.
    """

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._of_rank: dict[int, dict[int, list[_SizePlace]]] = {}  # by size; none is empty

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> QueuedRequest:
        """The latest of the least pressing, of at least one."""
        return self._places[-1][2]

    def push(self, request: QueuedRequest) -> None:
        insort(self._places, _place(request))
        self._join_size(request)

    def remove(self, request: QueuedRequest) -> None:
        del self._places[bisect_left(self._places, _place(request))]
        self._leave_size(request)

    def estimated(self, request: QueuedRequest, work: float) -> None:
        """How much work it is by now."""
        self._leave_size(request)
        request.work = work
        self._join_size(request)

    def first(self, now: float) -> QueuedRequest:
        """Of at least one; the earliest of equals."""
        sizes = self._of_rank[self._places[0][0]]
        return max(
            (places[0][2] for places in sizes.values()),
            key=lambda request: (request.response_ratio(now), -request.number),
        )

    def _join_size(self, request: QueuedRequest) -> None:
        sizes = self._of_rank.setdefault(request.rank, {})
        insort(sizes.setdefault(_size(request), []), _size_place(request))

    def _leave_size(self, request: QueuedRequest) -> None:
        sizes = self._of_rank[request.rank]
        places = sizes[_size(request)]
        del places[bisect_left(places, _size_place(request))]
        if not places:
            del sizes[_size(request)]
            if not sizes:
                del self._of_rank[request.rank]


class TenantQueue:
    """One tenant's waiting requests, a line for each model: those for different models can start at different times."""

    def __init__(self) -> None:
        self._lines: dict[str | None, Line] = {}  # by model; none is empty
        self._to_estimate: OrderedDict[QueuedRequest, None] = OrderedDict()  # all that wait, in turn
        self.num_requests = 0
        self.cost_tokens = 0

    @property
    def models(self) -> Set[str | None]:
        """Those that requests wait for."""
        return self._lines.keys()

    def waits_for(self, models: Set[str | None]) -> bool:
        """For any of them."""
        return not self._lines.keys().isdisjoint(models)

    def push(self, request: QueuedRequest) -> None:
        self._lines.setdefault(request.model, Line()).push(request)
        self._to_estimate[request] = None
        self.num_requests += 1
        self.cost_tokens += request.cost_tokens

    def remove(self, request: QueuedRequest) -> None:
        line = self._lines[request.model]
        line.remove(request)
        del self._to_estimate[request]
        if not line:
            del self._lines[request.model]
        self.num_requests -= 1
        self.cost_tokens -= request.cost_tokens

    def first(self, models: Container[str | None], now: float) -> QueuedRequest | None:
        """The next to start of those that wait for one of `models`."""
        firsts = [line.first(now) for model, line in self._lines.items() if model in models]
        return min(firsts, key=lambda one: (one.rank, -one.response_ratio(now), one.number), default=None)

    def estimate_some(self) -> None:
        """Anew, of how much work they are."""
        for each in list(islice(self._to_estimate, _ESTIMATES_A_START)):
            self._to_estimate.move_to_end(each)
            self._lines[each.model].estimated(each, each.estimate())

    def last(self) -> QueuedRequest:
        """The least pressing of at least one."""
        return max((line.last for line in self._lines.values()), key=lambda one: (one.rank, one.number))


class DeficitRoundRobin:
    """Whose turn it is among the tenants that wait: deficit round robin, counted in tokens.

    As in FQ-CoDel (RFC 8290, section 4.2): a tenant is served while it has credit and its last request may overdraw it,
    so that no request is too large; whoever comes anew goes first. A debt outlives the tenant's stay in the queue as
    long as anybody waits: nobody gains by sending one request at a time. Pure bookkeeping, without clock.
    """

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._credits: OrderedDict[str, int] = OrderedDict()  # tokens of tenants that wait or owe, by turn
        self._waiting: set[str] = set()

    def join(self, tenant: str) -> None:
        """It waits now. May be repeated."""
        self._waiting.add(tenant)
        if tenant not in self._credits:
            self._credits[tenant] = self._quantum_tokens
            self._credits.move_to_end(tenant, last=False)

    def leave(self, tenant: str) -> None:
        """Nothing of it waits any more. May be repeated."""
        self._waiting.discard(tenant)
        if not self._waiting:
            self._credits.clear()
        elif self._credits.get(tenant, 0) > 0:
            del self._credits[tenant]

    def next(self, can_start: Callable[[str], bool]) -> str | None:
        """Whose turn it is among those that can start something; None where nobody can.

        Who has credit stands before all that have none, so that the search mostly ends at once.
        """
        debtors = []
        for tenant, credit in self._credits.items():
            if can_start(tenant):
                if credit > 0:
                    return tenant
                debtors.append(tenant)
        return min(debtors, key=self._num_turns_to_credit, default=None)  # the first of those with the fewest

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A request of a tenant that waits has started."""
        num_turns = self._num_turns_to_credit(tenant)
        if num_turns:
            self._pass_turns(num_turns)
        self._credits[tenant] -= num_tokens
        if self._credits[tenant] <= 0:
            self._credits.move_to_end(tenant)

    def _num_turns_to_credit(self, tenant: str) -> int:
        credit = self._credits[tenant]
        return 0 if credit > 0 else -credit // self._quantum_tokens + 1

    def _pass_turns(self, num_turns: int) -> None:
        """Debts shrink, and nobody saves up more than one turn's credit."""
        for tenant, credit in list(self._credits.items()):
            self._credits[tenant] = min(credit + num_turns * self._quantum_tokens, self._quantum_tokens)
            if self._credits[tenant] > 0 and tenant not in self._waiting:
                del self._credits[tenant]


@dataclass(frozen=True, slots=True)
class HeldDemand:
    """What waits of one tenant, streams that have to go on elsewhere included."""

    num_requests: int
    num_tokens: float
    """Of their prompts, that no engine has cached."""


CanStart = Callable[[str | None, Callable[[], float]], bool]
"""Whether an endpoint can take a request for the model, given the response ratio of the one that would start."""


class RequestQueue:
    """`max_requests` bounds those that have not begun."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self._numbers = itertools.count()
        self._inside: set[QueuedRequest] = set()
        self._woken: QueuedRequest | None = None  # inside, but in no line
        self._begun = TenantQueue()  # of all tenants
        self._tenants: dict[str, TenantQueue] = {}  # none is empty
        self._num_of_model: Counter[str | None] = Counter()  # that have not begun; none is zero
        self._turns = DeficitRoundRobin()
        self.num_begun = 0
        """Streams that have to go on elsewhere."""

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def cost_tokens(self) -> int:
        """Of those that have not begun."""
        return sum(tenant.cost_tokens for tenant in self._tenants.values())

    def held_demand(self) -> Mapping[str, HeldDemand]:
        """By tenant."""
        num_requests = Counter(request.tenant for request in self._inside)
        num_tokens = dict.fromkeys(num_requests, 0.0)
        for request in self._inside:
            num_tokens[request.tenant] += request.uncached_tokens
        return {name: HeldDemand(number, num_tokens[name]) for name, number in num_requests.items()}

    def push(self, newcomer: QueuedRequest) -> QueuedRequest | None:
        """Where the queue is full, takes out and returns the request that makes way, perhaps the newcomer itself.

        That is the least pressing one of the tenant that has the most requests here, so that a tenant that floods the
        queue refuses its own.
        """
        newcomer.number = next(self._numbers)
        self._inside.add(newcomer)
        self.num_begun += newcomer.has_begun
        self._line_up(newcomer)
        if newcomer.has_begun or len(self) - self.num_begun <= self.max_requests:
            return None
        own = self._tenants[newcomer.tenant]
        longest = max(self._tenants.values(), key=lambda tenant: (tenant.num_requests, tenant is own))
        makes_way = longest.last()
        self.remove(makes_way)
        return makes_way

    def wake_next(self, can_start: CanStart, may_start: Callable[[str], bool], now: float) -> QueuedRequest | None:
        """The request whose turn it is, woken from now on. None: nobody can start, or one is woken already.

        `can_start` is asked once a model. `may_start`: whether its limits allow the tenant another request.
        """
        if self._woken is not None:
            return None
        self._woken = self._next_begun(can_start, now) or self._next_in_turn(can_start, may_start, now)
        if self._woken is not None:
            self._step_out(self._woken)
        return self._woken

    def next_in_turn(self, may_start: Callable[[str], bool], now: float) -> QueuedRequest | None:
        """Which of those that have not begun would start next, whatever model it is for."""
        return self._first_in_turn(self._num_of_model.keys(), may_start, now) if self._num_of_model else None

    def put_back(self, request: QueuedRequest) -> None:
        """The woken request cannot start after all, and has the place again that it had."""
        self._woken = None
        self._line_up(request)

    def started(self, request: QueuedRequest) -> None:
        """The woken request has its place at an endpoint, and its tenant's share pays for it."""
        if not request.has_begun:
            self._turns.charge(request.tenant, request.cost_tokens)
            if (tenant := self._tenants.get(request.tenant)) is not None:
                tenant.estimate_some()
        self.remove(request)

    def remove(self, request: QueuedRequest) -> None:
        """It waits no more. May be repeated."""
        if request not in self._inside:
            return
        self._inside.remove(request)
        self.num_begun -= request.has_begun
        if request is self._woken:
            self._woken = None
        else:
            self._step_out(request)
        if request.tenant not in self._tenants and not self._is_woken(request.tenant):
            self._turns.leave(request.tenant)

    def _next_begun(self, can_start: CanStart, now: float) -> QueuedRequest | None:
        return self._begun.first({model for model in self._begun.models if can_start(model, float)}, now)

    def _next_in_turn(self, can_start: CanStart, may_start: Callable[[str], bool], now: float) -> QueuedRequest | None:
        def response_ratio(model: str | None) -> float:
            first = self._first_in_turn({model}, may_start, now)
            return 0.0 if first is None else first.response_ratio(now)

        models = {model for model in self._num_of_model if can_start(model, partial(response_ratio, model))}
        return self._first_in_turn(models, may_start, now) if models else None

    def _first_in_turn(
        self, models: Set[str | None], may_start: Callable[[str], bool], now: float
    ) -> QueuedRequest | None:
        def can_go(name: str) -> bool:
            tenant = self._tenants.get(name)
            return tenant is not None and tenant.waits_for(models) and may_start(name)

        name = self._turns.next(can_go)
        return None if name is None else self._tenants[name].first(models, now)

    def _is_woken(self, tenant: str) -> bool:
        return self._woken is not None and not self._woken.has_begun and self._woken.tenant == tenant

    def _line_up(self, request: QueuedRequest) -> None:
        if request.has_begun:
            self._begun.push(request)
            return
        self._tenants.setdefault(request.tenant, TenantQueue()).push(request)
        self._num_of_model[request.model] += 1
        self._turns.join(request.tenant)

    def _step_out(self, request: QueuedRequest) -> None:
        if request.has_begun:
            self._begun.remove(request)
            return
        self._num_of_model[request.model] -= 1
        if not self._num_of_model[request.model]:
            del self._num_of_model[request.model]
        tenant = self._tenants[request.tenant]
        tenant.remove(request)
        if not tenant.num_requests:
            del self._tenants[request.tenant]
