"""What a prober makes of an engine's answers and silences, one probe after the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from kvasir_router.endpoints.endpoint import Address
from kvasir_router.fleet import EndpointState, Fleet
from kvasir_router.health import Prober
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex

pytestmark = pytest.mark.anyio
ENGINE = Address("http://engine")
SILENT, READY, LOADING = None, 200, 503
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class ScriptedEngine:
    """Stands for the HTTP session: each probe of /ready meets the next of `answers`, and then waits for ever."""

    def __init__(self, *answers: int | None) -> None:
        self._answers = list(answers)
        self.states: list[EndpointState | None] = []  # when each probe began: what the one before had led to
        self.fleet = Fleet(
            ApproximatePrefixIndex(1, 1.0), lambda: 0.0, lambda: None, max_in_flight=1, block_tokens=1,
            own_models={"m"},
        )  # fmt: skip
        self.fleet.set_addresses({ENGINE}, EndpointState.UNKNOWN)

    @contextlib.asynccontextmanager
    async def get(self, url: str, **options: Any) -> AsyncIterator[Any]:
        if not url.endswith("/ready"):
            yield SimpleNamespace(status=200, read=partial(self._read, url))
            return
        self.states.append(self.fleet.state_of(ENGINE.url))
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if answer is SILENT:
            raise TimeoutError
        yield SimpleNamespace(status=answer)

    async def _read(self, url: str) -> bytes:
        return b"kvasir_kv_cache_usage_ratio 0.5" if url.endswith("/metrics") else b"no list of models"


async def states_after(until: Until, *answers: int | None) -> list[EndpointState | None]:
    """The endpoint's state after each probe."""
    engine = ScriptedEngine(*answers)
    prober = Prober(engine.fleet, cast(aiohttp.ClientSession, engine), interval_seconds=0.001)
    prober.follow({ENGINE})
    await until(lambda: len(engine.states) > len(answers))
    await prober.close()
    return engine.states[1:]


async def test_an_engine_that_lists_no_models_is_scraped_all_the_same(until: Until) -> None:
    engine = ScriptedEngine(READY)
    prober = Prober(engine.fleet, cast(aiohttp.ClientSession, engine), interval_seconds=0.001)
    prober.follow({ENGINE})
    await until(lambda: engine.fleet.describe()[0]["kv_usage"] == 0.5)
    await prober.close()


UP, DOWN, NOT_READY = EndpointState.READY, EndpointState.UNREACHABLE, EndpointState.NOT_READY


async def test_a_busy_engine_may_miss_two_probes_and_not_a_third(until: Until) -> None:
    assert await states_after(until, READY, SILENT, SILENT, SILENT) == [UP, UP, UP, DOWN]


async def test_probes_are_missed_in_a_row_or_do_not_count(until: Until) -> None:
    answers = (READY, SILENT, SILENT, READY, SILENT, SILENT)
    assert await states_after(until, *answers) == [UP] * len(answers)


async def test_an_engine_that_was_never_ready_is_out_at_its_first_silence(until: Until) -> None:
    assert await states_after(until, SILENT, READY) == [DOWN, UP]


async def test_an_engine_that_says_it_is_not_ready_is_believed_at_once(until: Until) -> None:
    assert await states_after(until, READY, LOADING, READY) == [UP, NOT_READY, UP]
