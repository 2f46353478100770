import asyncio
import contextlib

import pytest

from kvasir_router.admission import Admission
from kvasir_router.errors import QueueFullError, QueueWaitExceededError

pytestmark = pytest.mark.anyio


class Slots:
    """Places that requests take; each admitted request takes one at once, as the app does."""

    def __init__(self, admission: Admission, free: int = 0) -> None:
        self.admission = admission
        self.free = free
        self.order: list[str] = []

    async def take(self, name: str, *, has_begun: bool = False) -> None:
        await self.admission.admit(lambda: self.free > 0, has_begun=has_begun)
        self.free -= 1
        self.order.append(name)

    def give(self, count: int) -> None:
        self.free += count
        self.admission.wake()


async def waiting(slots: Slots, *names: str) -> list[asyncio.Task[None]]:
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(slots.take(name)))
        await asyncio.sleep(0)
    return tasks


async def test_starts_at_once_where_there_is_room() -> None:
    assert await Admission(0, 1.0).admit(lambda: True) == 0.0


async def test_waiting_requests_start_in_order_of_arrival() -> None:
    slots = Slots(Admission(10, 5.0))
    tasks = await waiting(slots, "a", "b", "c")
    slots.give(3)
    await asyncio.gather(*tasks)
    assert slots.order == ["a", "b", "c"]


async def test_one_free_place_starts_one_request() -> None:
    slots = Slots(Admission(10, 5.0))
    tasks = await waiting(slots, "a", "b")
    slots.give(1)
    await tasks[0]
    await asyncio.sleep(0.01)
    assert (slots.order, slots.admission.num_waiting) == (["a"], 1)
    slots.give(1)
    await tasks[1]


async def test_a_newcomer_cannot_slip_past_a_woken_request() -> None:
    slots = Slots(Admission(10, 5.0))
    tasks = await waiting(slots, "a")
    slots.give(1)
    tasks += [asyncio.create_task(slots.take("late"))]
    await tasks[0]
    slots.give(1)
    await tasks[1]
    assert slots.order == ["a", "late"]


async def test_a_full_queue_refuses_with_retry_after() -> None:
    slots = Slots(Admission(1, 5.0))
    tasks = await waiting(slots, "a")
    with pytest.raises(QueueFullError, match="already waiting") as refused:
        await slots.take("b")
    assert refused.value.retry_after_seconds
    slots.give(1)
    await asyncio.gather(*tasks)


async def test_waiting_too_long_is_refused_and_leaves_the_queue() -> None:
    admission = Admission(10, 0.01)
    with pytest.raises(QueueWaitExceededError, match=r"within 0\.01 s") as refused:
        await admission.admit(lambda: False)
    assert refused.value.retry_after_seconds
    assert admission.num_waiting == 0


async def test_time_waited_before_a_retry_counts() -> None:
    with pytest.raises(QueueWaitExceededError):
        await Admission(10, 60.0).admit(lambda: False, waited_seconds=60.0)


async def test_a_request_whose_client_left_makes_room_for_the_next() -> None:
    slots = Slots(Admission(10, 5.0))
    tasks = await waiting(slots, "a", "b")
    slots.free = 1
    slots.admission.wake()
    tasks[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks[0]
    await tasks[1]
    assert slots.order == ["b"]


async def test_a_request_that_no_endpoint_fits_does_not_block_those_behind() -> None:
    admission = Admission(10, 5.0)
    free = False
    stuck = asyncio.create_task(admission.admit(lambda: False))
    await asyncio.sleep(0)
    behind = asyncio.create_task(admission.admit(lambda: free))
    await asyncio.sleep(0)
    free = True
    admission.wake()
    await behind
    stuck.cancel()


async def test_streams_that_have_begun_come_before_requests_that_have_not() -> None:
    slots = Slots(Admission(1, 5.0))
    (behind,) = await waiting(slots, "new")
    resumed = asyncio.create_task(slots.take("resumed", has_begun=True))  # beyond the queue's bound
    await asyncio.sleep(0)
    slots.give(1)
    await resumed
    assert (slots.order, slots.admission.num_waiting) == (["resumed"], 1)
    slots.give(1)
    await behind


async def test_a_woken_request_that_lost_its_place_wakes_the_next_that_fits() -> None:
    admission, free = Admission(10, 5.0), {"a": 0, "b": 0}

    async def take(model: str, *, has_begun: bool = False) -> None:
        await admission.admit(lambda: free[model] > 0, has_begun=has_begun)
        free[model] -= 1

    passed_over, fitting = asyncio.create_task(take("a")), asyncio.create_task(take("b"))
    await asyncio.sleep(0)
    free.update(a=1, b=1)
    admission.wake()
    await take("a", has_begun=True)
    await asyncio.wait_for(fitting, 1)
    assert not passed_over.done()
    free["a"] = 1
    admission.wake()
    await passed_over
