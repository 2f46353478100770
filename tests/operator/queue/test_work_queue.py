"""What workers get of the work queue, and when they are woken."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.queue.back_off import BackOff
from kvasir_operator.queue.schedule import KeySchedule
from kvasir_operator.queue.work_queue import WorkQueue

A, B = ServiceKey("models", "a"), ServiceKey("models", "b")


def within(seconds: float, body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, seconds))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingSchedule(KeySchedule):
    """Counts how often a worker looks for a key, and all keys are searched for the next one."""

    num_looks = num_searches = 0

    def take(self, now: float) -> ServiceKey | None:
        self.num_looks += 1
        return super().take(now)

    def next_start(self) -> float | None:
        self.num_searches += 1
        return super().next_start()


def test_a_worker_wakes_for_a_new_key() -> None:
    async def body() -> ServiceKey | None:
        queue = WorkQueue(Clock())
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(A)
        return await waiting

    assert within(5, body()) == A


def test_every_waiting_worker_gets_a_key_of_its_own() -> None:
    async def body() -> set[ServiceKey | None]:
        queue = WorkQueue(Clock())
        workers = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add(A)
        queue.add(B)
        return set(await asyncio.gather(*workers))

    assert within(5, body()) == {A, B}


def test_no_key_is_searched_for_workers_that_have_their_passes() -> None:
    async def body() -> set[ServiceKey]:
        schedule = CountingSchedule()
        queue = WorkQueue(Clock(), schedule)
        for key in (A, B):
            queue.add(key)
        taken = set()
        while len(taken) < 2 and (key := await queue.get()) is not None:
            taken.add(key)
            queue.done(key)
        assert schedule.num_searches == 0
        return taken

    assert within(5, body()) == {A, B}


def test_one_worker_waits_for_what_is_due_next_and_wishes_for_later_wake_nobody() -> None:
    async def body() -> tuple[int, int, ServiceKey | None]:
        schedule = CountingSchedule()
        queue = WorkQueue(Clock(), schedule)
        workers = [asyncio.create_task(queue.get()) for _ in range(8)]
        await asyncio.sleep(0)
        queue.add(B, 50.0)
        await asyncio.sleep(0)
        looks_before = schedule.num_looks
        for _ in range(5):
            queue.debounce(A, 100.0)
            queue.add(B, 50.0)
            await asyncio.sleep(0)
        looks_for_later = schedule.num_looks - looks_before
        queue.add(A)
        done, rest = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        looks = schedule.num_looks - looks_before  # of the one that was woken, and of the one whose turn it is then
        queue.close()
        await asyncio.gather(*rest)
        [first] = done
        return looks_for_later, looks, first.result()

    assert within(5, body()) == (0, 2, A)


def test_a_worker_that_is_cancelled_when_it_is_woken_leaves_its_turn_to_another() -> None:
    async def body() -> ServiceKey | None:
        queue = WorkQueue(Clock())
        first, second = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add(A)
        first.cancel()
        await asyncio.wait([first])
        return await second

    assert within(5, body()) == A


def test_a_worker_that_was_cancelled_while_it_waited_is_passed_over() -> None:
    async def body() -> ServiceKey | None:
        queue = WorkQueue(Clock())
        first, second = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        first.cancel()
        queue.add(A)
        return await second

    assert within(5, body()) == A


def test_a_key_that_is_due_earlier_than_what_is_waited_for_is_handed_out_first() -> None:
    async def body() -> list[ServiceKey | None]:
        queue = WorkQueue(asyncio.get_running_loop().time, KeySchedule(spacing_seconds=0.0))
        waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add(A, 0.1)
        queue.add(B, 0.02)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return [*(each.result() for each in done), *(await asyncio.gather(*waiting))]

    first, *both = within(5, body())
    assert (first, set(both)) == (B, {A, B})


def test_a_failed_key_comes_back_by_itself() -> None:
    async def body() -> ServiceKey | None:
        queue = WorkQueue(asyncio.get_running_loop().time, KeySchedule(BackOff(0.01, 0.01), 0.0))
        queue.add(A)
        assert await queue.get() == A
        assert queue.failed(A) == 0.01
        return await queue.get()

    assert within(5, body()) == A


def test_closing_lets_waiting_workers_end_and_hands_out_nothing_more() -> None:
    async def body() -> list[ServiceKey | None]:
        queue = WorkQueue(Clock())
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.close()
        queue.add(A)
        return [await waiting, await queue.get()]

    assert within(5, body()) == [None, None]


def test_a_forgotten_key_is_handed_out_without_the_spacing_of_its_last_pass() -> None:
    async def body() -> ServiceKey | None:
        queue = WorkQueue(Clock(), KeySchedule(spacing_seconds=5.0))
        queue.add(A)
        await queue.get()
        queue.forget(A)
        queue.add(A)
        return await queue.get()

    assert within(5, body()) == A


def test_a_key_whose_service_is_gone_keeps_none_of_its_failures() -> None:
    async def body() -> float:
        queue = WorkQueue(asyncio.get_running_loop().time, KeySchedule(BackOff(0.01, 1.0), 0.0))
        queue.add(A)
        for _ in range(2):
            assert await queue.get() == A
            queue.failed(A)
        assert await queue.get() == A
        queue.forget(A)
        queue.add(A)
        assert await queue.get() == A
        return queue.failed(A)

    assert within(5, body()) == 0.01
