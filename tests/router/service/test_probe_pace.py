import asyncio

import pytest

from kvasir_router.service.health import ProbePace

pytestmark = pytest.mark.anyio


async def begun_within(pace: ProbePace, count: int) -> float:
    """Seconds until so many have begun that all came at once."""
    begin = asyncio.get_running_loop().time()
    await asyncio.gather(*(pace.turn() for _ in range(count)))
    return asyncio.get_running_loop().time() - begin


async def test_a_few_begin_at_once() -> None:
    assert await begun_within(ProbePace(per_second=20.0), 5) < 0.05


async def test_more_begin_one_after_the_other() -> None:
    assert await begun_within(ProbePace(per_second=100.0), 50) > 0.2


async def test_what_was_not_used_is_not_saved_for_ever() -> None:
    pace = ProbePace(per_second=100.0)
    await pace.turn()
    await asyncio.sleep(0.5)
    assert await begun_within(pace, 50) > 0.2
