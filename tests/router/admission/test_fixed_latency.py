"""Engines that take a fixed time before each first token, and let no request wait for another, in virtual time."""

import asyncio
from collections.abc import Iterator
from math import inf

import pytest
from benchmarks.routing.virtual_time import VirtualTimeLoop
from tests.router.parts import a_request

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.admission.tenant_limits import TenantLimits
from kvasir_router.endpoints.address import Address
from kvasir_router.picker import Picker
from kvasir_router.placement.finish_time import FinishTime
from kvasir_router.service.late_binding import LateBinding
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

MAX_IN_FLIGHT, MAX_WAITING = 512, 1000


class Router:
    """Four engines, and the router's own bounds."""

    def __init__(self) -> None:
        clock, prefill = asyncio.get_running_loop().time, FleetPrefill()
        self.clock = clock
        self.registry = Registry(lambda: EndpointLoad(MAX_IN_FLIGHT, prefill.new_member()), lambda: None, {"m"})
        self.registry.set_addresses({Address(url) for url in "abcd"}, EndpointState.READY)
        binding = LateBinding(self.registry, 0.25, clock)
        limits = TenantLimits(None, None, lambda: None)
        self.admission = Admission(binding.seconds_to_room, QueueLimits(MAX_WAITING, inf), limits)
        self.ledger = Ledger(self.admission.wake)
        self.picker = Picker(FinishTime())
        self.waited_seconds: list[float] = []

    async def answer(self, first_token_seconds: float, *, is_stream: bool, num_tokens: int) -> None:
        """A stream goes on for three times as long as it takes to begin."""
        self.waited_seconds.append(await self.admission.admit(QueuedRequest("m", "t", num_tokens)))
        request = a_request(num_tokens, request_id=str(len(self.waited_seconds)))
        placement = self.picker.pick(request, self.registry.serving("m"), {}, self.clock())
        assert placement is not None
        (ticket,) = self.ledger.dispatch(request, placement, self.clock())
        await asyncio.sleep(first_token_seconds)
        if is_stream:
            ticket.first_token(self.clock())
            await asyncio.sleep(3 * first_token_seconds)
        else:
            ticket.whole_answer(self.clock())
        ticket.finish()

    async def answer_many(
        self, count: int, a_second: float, first_token_seconds: float, *, is_stream: bool = True, num_tokens: int = 30
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(self.answer(first_token_seconds, is_stream=is_stream, num_tokens=num_tokens))
                await asyncio.sleep(1 / a_second)


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


async def _waits_of_2000_streams(*, after_quicker_answers: bool) -> list[float]:
    router = Router()
    if after_quicker_answers:  # long prompts at once, then a few streams
        await router.answer_many(200, 400.0, 0.01, is_stream=False, num_tokens=100_000)
        await router.answer_many(500, 250.0, 0.02)
        await asyncio.sleep(5.0)
        router.waited_seconds.clear()
    await router.answer_many(2000, 2000.0, 0.5)
    return router.waited_seconds


@pytest.mark.parametrize("after_quicker_answers", [False, True])
def test_of_2000_streams_none_is_held_and_none_refused(loop: VirtualTimeLoop, after_quicker_answers: bool) -> None:
    waits = loop.run_until_complete(_waits_of_2000_streams(after_quicker_answers=after_quicker_answers))
    assert waits == [0.0] * 2000
