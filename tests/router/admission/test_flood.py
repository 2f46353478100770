"""One tenant floods, another keeps asking: what the other waits for, in virtual time."""

import asyncio
import random
from collections.abc import Iterator
from math import inf

import pytest
from benchmarks.routing.virtual_time import VirtualTimeLoop

from kvasir_router.admission.admission import Admission, QueueLimits
from kvasir_router.admission.queued_request import QueuedRequest
from kvasir_router.admission.tenant_limits import TenantLimits

NUM_FLOODING = 1000


class SimulatedEngine:
    """Answers so many requests at once, each within about a second."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._random = random.Random(1)
        self.admission = Admission(
            lambda *_: 0.0 if self._num_free > 0 else inf,
            QueueLimits(1000, 600.0),
            TenantLimits(None, None, lambda: None),
        )

    async def answer(self, tenant: str, num_tokens: int = 1000) -> float:
        """Returns the seconds that it took, the queue included."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        await self.admission.admit(QueuedRequest("m", tenant, num_tokens))
        self._num_free -= 1
        await asyncio.sleep(self._random.uniform(0.5, 1.5))
        self._num_free += 1
        self.admission.wake()
        return loop.time() - start


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    yield loop
    loop.close()


async def _ask_now_and_then(engine: SimulatedEngine) -> list[float]:
    tasks = []
    for _ in range(60):
        await asyncio.sleep(0.4)
        tasks.append(asyncio.ensure_future(engine.answer("quiet")))
    return await asyncio.gather(*tasks)


async def _seconds_of_quiet_tenant(*, flooded: bool) -> list[float]:
    engine = SimulatedEngine(num_slots=8)
    flood = [asyncio.ensure_future(engine.answer("flood")) for _ in range(NUM_FLOODING if flooded else 0)]
    await asyncio.sleep(2.0)
    seconds = await _ask_now_and_then(engine)
    assert engine.admission.num_waiting > 0 or not flooded  # the flood has lasted longer
    await asyncio.gather(*flood)
    assert engine.admission.num_waiting == 0
    return sorted(seconds)


def test_a_tenant_beside_one_that_floods_waits_at_most_half_as_long_again_as_alone(loop: VirtualTimeLoop) -> None:
    alone = loop.run_until_complete(_seconds_of_quiet_tenant(flooded=False))
    beside = loop.run_until_complete(_seconds_of_quiet_tenant(flooded=True))
    assert beside[-1] <= 1.5 * alone[-1]
    assert sum(beside) <= 1.5 * sum(alone)


async def _tokens_started_of(num_tokens: dict[str, int]) -> dict[str, int]:
    """Of tenants that always wait, in a minute."""
    engine = SimulatedEngine(num_slots=4)
    started = dict.fromkeys(num_tokens, 0)

    async def keep_asking(tenant: str) -> None:
        while True:
            await engine.answer(tenant, num_tokens[tenant])
            started[tenant] += num_tokens[tenant]

    tasks = [asyncio.ensure_future(keep_asking(tenant)) for tenant in num_tokens for _ in range(20)]
    await asyncio.sleep(600.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return started


def test_tenants_that_ask_for_all_they_can_get_equal_shares_of_tokens(loop: VirtualTimeLoop) -> None:
    started = loop.run_until_complete(_tokens_started_of({"short": 500, "long": 2000, "longer": 8000}))
    assert max(started.values()) <= 1.15 * min(started.values())
