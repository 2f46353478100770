"""What becomes of the operator when one of its tasks ends, and how all of them are stopped."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvasir_operator.errors import KvasirOperatorError, LeadershipLostError
from kvasir_operator.parts import Parts


def reported(body: Coroutine[Any, Any, None]) -> list[str]:
    """Why a part with this body ended, as the operator hears of it."""

    async def run() -> list[str]:
        errors: list[KvasirOperatorError] = []
        task = Parts(errors.append).start("resync", body)
        await asyncio.wait({task})
        await asyncio.sleep(0)  # the callbacks of a task run in the loop's next turn
        return [str(error) for error in errors]

    return asyncio.run(run())


async def ends() -> None:
    return


async def fails(error: Exception) -> None:
    raise error


def test_a_part_that_ends_by_itself_is_reported_by_its_name() -> None:
    assert reported(ends()) == ["the operator's resync ended by itself: None"]


def test_a_bug_is_reported_with_its_part_and_an_error_of_ours_as_it_is() -> None:
    assert reported(fails(KeyError("spec"))) == ["the operator's resync ended by itself: KeyError('spec')"]
    assert reported(fails(LeadershipLostError("usurper took it"))) == ["usurper took it"]


def test_parts_are_stopped_in_the_order_opposite_to_their_start_and_none_is_reported() -> None:
    async def body() -> tuple[list[str], list[KvasirOperatorError]]:
        ended: list[str] = []
        errors: list[KvasirOperatorError] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        parts = Parts(errors.append)
        for name in ("Lease", "informers", "worker"):
            parts.start(name, wait(name))
        await asyncio.sleep(0)
        await parts.stop()
        return ended, errors

    assert asyncio.run(body()) == (["worker", "informers", "Lease"], [])


def test_what_drains_may_end_before_the_rest_is_stopped() -> None:
    async def body() -> bool:
        parts, closed = Parts(lambda error: None), asyncio.Event()

        async def drains() -> None:
            await closed.wait()
            await asyncio.sleep(0.01)

        worker = parts.start("worker", drains())
        await asyncio.sleep(0)
        closed.set()
        await parts.stop(draining=[worker])
        return worker.cancelled()

    assert not asyncio.run(body())


def test_a_pass_that_does_not_end_holds_up_the_stop_for_a_bounded_time() -> None:
    async def body() -> bool:
        parts = Parts(lambda error: None, stop_grace_seconds=0.01)

        async def hangs() -> None:
            await asyncio.Event().wait()

        worker = parts.start("worker", hangs())
        await asyncio.sleep(0)
        await asyncio.wait_for(parts.stop(draining=[worker]), 10)
        return worker.cancelled()

    assert asyncio.run(body())
