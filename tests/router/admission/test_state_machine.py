"""Arbitrary arrivals, places, losses, departures and pauses against admission, in virtual time."""

from typing import Any

from benchmarks.routing.virtual_time import VirtualTimeLoop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.router.admission.places import Asked, Places

from kvasir_router.errors import DeadlineExceededError, QueueFullError, QueueWaitExceededError, TenantInFlightLimitError

TENANTS, MODELS = ("a", "b", "c"), ("m", "n")
MAX_REQUESTS, MAX_WAIT_SECONDS, MAX_IN_FLIGHT = 6, 30.0, 3
REFUSALS = (DeadlineExceededError, QueueFullError, QueueWaitExceededError, TenantInFlightLimitError)


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.places = Places(
            self.loop,
            max_requests=MAX_REQUESTS,
            max_wait_seconds=MAX_WAIT_SECONDS,
            tenant_max_in_flight=MAX_IN_FLIGHT,
        )
        self.asked: dict[Asked, float] = {}  # and when
        self.num_checked = 0

    @property
    def waiting(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.is_waiting]

    @rule(
        tenant=st.sampled_from(TENANTS),
        model=st.sampled_from(MODELS),
        num_tokens=st.integers(0, 5000),
        priority=st.integers(-1, 1),
        deadline_seconds=st.none() | st.floats(0.5, 60.0),
        has_begun=st.booleans(),
    )
    def arrive(self, **fields: Any) -> None:
        waiting_before = self.waiting
        asked = self.places.ask(**fields)
        self.asked[asked] = self.loop.time()
        if asked.has_started:
            self._check_order(asked, waiting_before)
        if fields["has_begun"]:
            assert asked.error is None

    @rule(model=st.sampled_from(MODELS), count=st.integers(1, 3))
    def give(self, model: str, count: int) -> None:
        self.places.give(count, model)

    @rule(model=st.sampled_from(MODELS))
    def give_and_take_back(self, model: str) -> None:
        num_started = len(self.places.started)
        has_room = self.places.free[model] > 0
        self.places.give_and_take_back(model)
        assert has_room or len(self.places.started) == num_started

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = [asked for asked in self.places.started if not asked.task.done()]
        if running:
            self.places.finish(data.draw(st.sampled_from(running)))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            self.places.cancel(data.draw(st.sampled_from(self.waiting)))

    @rule(seconds=st.floats(0.0, 20.0))
    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @invariant()
    def whoever_starts_goes_before_none_of_its_line(self) -> None:
        for asked in self.places.started[self.num_checked :]:
            self._check_order(asked, [other for other in self.waiting if other.queued.number < asked.queued.number])
        self.num_checked = len(self.places.started)

    @invariant()
    def nobody_waits_who_could_start(self) -> None:
        for asked in self.waiting:
            queued = asked.queued
            may_start = queued.has_begun or self.places.tenant_limits.may_start(queued.tenant)
            assert not (may_start and self.places.free[queued.model] > 0)

    @invariant()
    def no_place_and_no_limit_is_exceeded(self) -> None:
        assert min(self.places.free.values(), default=0) >= 0
        assert sum(not asked.queued.has_begun for asked in self.waiting) <= MAX_REQUESTS
        for tenant in TENANTS:
            running = [one for one in self.places.started if not one.task.done() and one.queued.tenant == tenant]
            assert self.places.tenant_limits.num_in_flight(tenant) == len(running)
            assert sum(not one.queued.has_begun for one in running) <= MAX_IN_FLIGHT

    @invariant()
    def nobody_waits_longer_than_it_may(self) -> None:
        for asked in self.waiting:
            deadline = MAX_WAIT_SECONDS if asked.queued.has_begun else asked.queued.deadline_seconds or MAX_WAIT_SECONDS
            assert self.loop.time() - self.asked[asked] <= min(deadline, MAX_WAIT_SECONDS) + 1e-6

    @invariant()
    def what_waits_is_counted(self) -> None:
        assert self.places.admission.num_waiting == len(self.waiting)
        held = self.places.admission.held_demand()
        for tenant in TENANTS:
            own = [asked.queued for asked in self.waiting if asked.queued.tenant == tenant]
            assert (tenant in held) == bool(own)
            if own:
                tokens = sum(queued.uncached_tokens for queued in own)
                assert (held[tenant].num_requests, held[tenant].num_tokens) == (len(own), tokens)

    @invariant()
    def whoever_is_refused_is_told_why(self) -> None:
        for asked in self.asked:
            assert asked.error is None or isinstance(asked.error, REFUSALS)

    def teardown(self) -> None:
        for asked in list(self.asked):
            asked.end.set()
            asked.task.cancel()
        self.loop.settle()
        assert self.places.admission.num_waiting == 0
        assert self.places.admission.held_demand() == {}
        self.loop.close()

    def _check_order(self, started: Asked, waiting: list[Asked]) -> None:
        """Nobody that still waits should have gone before it: no stream that has begun, none of its tenant's line."""
        for other in waiting:
            if not other.is_waiting or other.queued.model != started.queued.model:
                continue
            assert started.queued.has_begun or not other.queued.has_begun
            if other.queued.tenant == started.queued.tenant and not started.queued.has_begun:
                assert started.queued.priority < other.queued.priority


AdmissionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase
