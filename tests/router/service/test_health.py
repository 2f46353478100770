"""What a prober makes of an engine's answers and silences, one probe after the other."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from tests.router.parts import a_request

from kvasir_router.config import PROBE_LIMITS, ProbeLimits
from kvasir_router.endpoints.address import Address
from kvasir_router.placement.placement import Placement, leg_on
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex, BlockHashes
from kvasir_router.service.health import PROBE_TIMES, ProbePace, Prober, ProbeTimes
from kvasir_router.service.ledger import Ledger
from kvasir_router.service.load import EndpointLoad
from kvasir_router.service.load_report import REPORT_LIFETIME_SECONDS, LoadReport
from kvasir_router.service.prefill_rate import FleetPrefill
from kvasir_router.service.registry import EndpointState, Registry

pytestmark = pytest.mark.anyio
ENGINE = Address("http://engine")
SILENT, BUSY, READY, LOADING = None, -1, 200, 503
SELDOM = ProbeTimes(idle_intervals=(1e9, 1e9))
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class ScriptedEngine:
    """Stands for the HTTP session: each probe of /ready meets the next of `answers`, and then waits for ever."""

    def __init__(self, *answers: int | None) -> None:
        self.answers = list(answers)
        self.states: list[EndpointState | None] = []  # when each probe began: what the one before had led to
        self.num_scrapes = 0
        self.num_listings = 0
        self.models = b'{"data": []}'
        self.loads: list[bytes] = []  # what /load answers, one after the other, then for ever the last
        self.hangs_at: str | None = None  # a page that never comes
        self.patience_seconds: float | None = None  # of whoever waits for that page
        self.statuses: dict[str, int] = {}  # of other pages than /ready, where not 200
        self.ledger = Ledger(lambda: None)
        self.registry = Registry(lambda: EndpointLoad(1, FleetPrefill().new_member()), lambda: None, own_models={"m"})
        self.registry.set_addresses({ENGINE}, EndpointState.UNKNOWN)
        self.index = ApproximatePrefixIndex(1, 1.0, 1, 1.0)
        self.index.insert(ENGINE.url, BlockHashes(1, (7,)), 0.0, None)

    @contextlib.asynccontextmanager
    async def probed(
        self,
        interval_seconds: float = 0.001,
        times: ProbeTimes = PROBE_TIMES,
        limits: ProbeLimits = PROBE_LIMITS,
        take_heard: Callable[[str], bool] = lambda url: False,
    ) -> AsyncIterator[Prober]:
        session, pace = cast(aiohttp.ClientSession, self), ProbePace(per_second=1e6)
        prober = Prober(
            self.registry, self.ledger, self.index, session, interval_seconds, pace,
            times=times, limits=limits, take_heard=take_heard,
        )  # fmt: skip
        prober.follow({ENGINE})
        yield prober
        await prober.close()

    @contextlib.asynccontextmanager
    async def get(self, url: str, **options: Any) -> AsyncIterator[Any]:
        if not url.endswith("/ready"):
            if self.hangs_at is not None and url.endswith(self.hangs_at):
                self.patience_seconds = options["timeout"].total
                async with asyncio.timeout(self.patience_seconds):
                    await asyncio.Event().wait()
            status = self.statuses.get(url.removeprefix(ENGINE.url), 200)
            if status != 200 and options.get("raise_for_status"):
                raise aiohttp.ClientError
            yield SimpleNamespace(status=status, read=partial(self._read, url))
            return
        self.states.append(self.registry.state_of(ENGINE.url))
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if answer is SILENT:
            raise aiohttp.ConnectionTimeoutError
        if answer == BUSY:
            raise TimeoutError
        yield SimpleNamespace(status=answer)

    async def _read(self, url: str) -> bytes:
        self.num_scrapes += url.endswith("/metrics")
        self.num_listings += url.endswith("/v1/models")
        if url.endswith("/load") and self.loads:
            return self.loads.pop(0) if len(self.loads) > 1 else self.loads[0]
        return b"kvasir_kv_cache_usage_ratio 0.5" if url.endswith("/metrics") else self.models


async def states_after(until: Until, *answers: int | None) -> list[EndpointState | None]:
    """The endpoint's state after each probe."""
    engine = ScriptedEngine(*answers)
    async with engine.probed():
        await until(lambda: len(engine.states) > len(answers))
    return engine.states[1:]


async def test_an_engine_that_lists_no_models_is_scraped_all_the_same(until: Until) -> None:
    engine = ScriptedEngine(READY)
    engine.models = b"no list of models"
    endpoint = engine.registry.get(ENGINE.url)
    assert endpoint is not None
    async with engine.probed():
        await until(lambda: endpoint.load.kv_usage == 0.5)


@pytest.mark.parametrize(("answer", "num_blocks"), [(LOADING, 1), (SILENT, 0)])
async def test_the_cache_of_an_unreachable_engine_is_not_counted_on(
    until: Until, answer: int | None, num_blocks: int
) -> None:
    engine = ScriptedEngine(READY, answer, *[SILENT, SILENT] * (answer is SILENT))
    num_answers = len(engine.answers)
    async with engine.probed():
        await until(lambda: len(engine.states) > num_answers)
    assert engine.index.num_blocks(ENGINE.url) == num_blocks


@pytest.mark.parametrize(
    ("away", "before", "after", "num_blocks"),
    [
        (LOADING, b'{"instance": "a"}', b'{"instance": "a"}', 1),
        (LOADING, b'{"instance": "a"}', b'{"instance": "b"}', 0),
        (LOADING, b"{}", b"{}", 0),
        (LOADING, b'{"instance": "a"}', b'{"instance": "\xff"}', 0),
        (SILENT, b'{"instance": "a"}', b'{"instance": "a"}', 1),
        (SILENT, b'{"instance": "a"}', b'{"instance": "b"}', 0),
        (SILENT, b"{}", b"{}", 1),
        (SILENT, b'{"instance": "a"}', b"{}", 1),
    ],
)
async def test_what_an_engine_had_cached_is_counted_on_in_the_same_process_only(
    until: Until, away: int | None, before: bytes, after: bytes, num_blocks: int
) -> None:
    """An engine that is not ready for a while may be restarted; one that is silent for a moment is busy, as a rule."""
    engine = ScriptedEngine(READY, away, away, READY)
    engine.loads = [before, after]
    async with engine.probed():
        await until(lambda: len(engine.states) == 5)
    assert (engine.states[-1], engine.index.num_blocks(ENGINE.url)) == (EndpointState.READY, num_blocks)


async def test_an_engine_that_does_not_say_which_process_it_is_is_not_waited_for(until: Until) -> None:
    engine = ScriptedEngine(READY)
    engine.hangs_at = "/load"
    async with engine.probed(times=ProbeTimes(instance_timeout=0.01)):
        await until(lambda: engine.registry.state_of(ENGINE.url) is EndpointState.READY)
    assert engine.patience_seconds == 0.01


async def test_an_engine_that_is_ready_for_the_first_time_has_lost_nothing(until: Until) -> None:
    engine = ScriptedEngine(LOADING, READY, READY)
    async with engine.probed():
        await until(lambda: len(engine.states) == 4)
    assert engine.index.num_blocks(ENGINE.url) == 1


UP, DOWN, NOT_READY = EndpointState.READY, EndpointState.UNREACHABLE, EndpointState.NOT_READY


async def test_a_busy_engine_may_miss_two_probes_and_not_a_third(until: Until) -> None:
    assert await states_after(until, READY, SILENT, SILENT, SILENT) == [UP, UP, UP, DOWN]


async def test_probes_are_missed_in_a_row_or_do_not_count(until: Until) -> None:
    answers = (READY, SILENT, SILENT, READY, SILENT, SILENT)
    assert await states_after(until, *answers) == [UP] * len(answers)


async def test_an_engine_that_takes_connections_and_does_not_answer_is_busy_and_keeps_what_it_has_cached(
    until: Until,
) -> None:
    engine = ScriptedEngine(READY, BUSY, BUSY, BUSY, BUSY, READY)
    engine.loads = [b'{"instance": "a"}']
    async with engine.probed():
        await until(lambda: len(engine.states) == 7)
    assert engine.states[1:] == [UP, UP, UP, NOT_READY, NOT_READY, UP]
    assert engine.index.num_blocks(ENGINE.url) == 1


async def test_bytes_from_before_the_last_probe_are_no_sign_of_life(until: Until) -> None:
    heard = [True]
    engine = ScriptedEngine(READY, *[BUSY] * PROBE_LIMITS.failures)
    async with engine.probed(take_heard=lambda url: bool(heard) and heard.pop()):
        await until(lambda: len(engine.states) == PROBE_LIMITS.failures + 2)
    assert engine.states[-2:] == [UP, NOT_READY]


async def test_an_engine_that_sends_bytes_of_answers_lives_whatever_its_probes_say(until: Until) -> None:
    engine = ScriptedEngine(READY, BUSY, BUSY, BUSY, BUSY)
    async with engine.probed(take_heard=lambda url: url == ENGINE.url):
        await until(lambda: len(engine.states) == 6)
    assert engine.states[1:] == [UP] * 5


@pytest.mark.parametrize(
    ("answer", "hung_after", "is_interrupted"), [(SILENT, 1e9, True), (BUSY, 1e9, False), (BUSY, 0.0, True)]
)
async def test_requests_are_interrupted_where_nobody_is_there_or_nothing_has_come_for_long(
    until: Until, answer: int | None, hung_after: float, is_interrupted: bool
) -> None:
    engine = ScriptedEngine(READY, answer, answer, answer)
    endpoint = engine.registry.get(ENGINE.url)
    assert endpoint is not None
    [ticket] = engine.ledger.dispatch(a_request(), Placement(leg_on(endpoint, a_request(), {})), 0.0)
    interruptions: list[bool] = []
    ticket.on_interrupt = interruptions.append
    async with engine.probed(limits=ProbeLimits(hung_after=hung_after)):
        await until(lambda: len(engine.states) == 5)
    assert interruptions == [True] * is_interrupted


@pytest.mark.parametrize(("answers", "are_silence"), [((LOADING, READY), [True]), ((LOADING, LOADING), [True, False])])
async def test_an_engine_that_is_unhealthy_for_a_moment_keeps_what_no_other_can_take(
    until: Until, answers: tuple[int, ...], are_silence: list[bool]
) -> None:
    engine = ScriptedEngine(READY, *answers)
    engine.statuses = {"/health": 503}
    endpoint = engine.registry.get(ENGINE.url)
    assert endpoint is not None
    [ticket] = engine.ledger.dispatch(a_request(), Placement(leg_on(endpoint, a_request(), {})), 0.0)
    interruptions: list[bool] = []
    ticket.on_interrupt = interruptions.append
    async with engine.probed():
        await until(lambda: len(engine.states) == 4)
    assert interruptions == are_silence


@pytest.mark.parametrize(("num_unhealthy", "keeps"), [(1, True), (2, False)])
async def test_an_engine_that_was_unhealthy_for_a_moment_has_what_it_had_cached(
    until: Until, num_unhealthy: int, keeps: bool
) -> None:
    engine = ScriptedEngine(READY, *[LOADING] * num_unhealthy, READY)
    engine.statuses, engine.loads = {"/health": 503}, [b'{"instance": "a"}']
    async with engine.probed():
        await until(lambda: len(engine.states) == num_unhealthy + 3)
    assert engine.states[-1] is UP
    assert bool(engine.index.num_blocks(ENGINE.url)) is keeps


@pytest.mark.parametrize(("length", "known"), [("2048", 2048), ("null", None), ('"2048"', None), ("-1", None)])
async def test_an_engine_that_says_its_length_in_another_form_is_listed_all_the_same(
    until: Until, length: str, known: int | None
) -> None:
    engine = ScriptedEngine(READY)
    engine.models = f'{{"data": [{{"id": "own", "max_model_len": {length}}}]}}'.encode()
    async with engine.probed():
        await until(lambda: engine.registry.listed_models() == {"own"})
    assert engine.registry.max_model_len("own") == known


async def test_an_engine_that_was_never_ready_is_out_at_its_first_silence(until: Until) -> None:
    assert await states_after(until, SILENT, READY) == [DOWN, UP]


async def test_an_engine_that_says_it_is_not_ready_is_believed_at_once(until: Until) -> None:
    assert await states_after(until, READY, LOADING, READY) == [UP, NOT_READY, UP]


@pytest.mark.parametrize(
    ("ready", "health", "models", "state"),
    [
        (401, 200, 200, UP),
        (403, 200, 200, UP),
        (404, 200, 200, UP),
        (405, 200, 200, UP),
        (404, 429, 200, NOT_READY),
        (403, 404, 200, UP),
        (404, 405, 200, NOT_READY),
        (404, 404, 401, NOT_READY),
        (429, 200, 200, NOT_READY),
        (500, 200, 200, NOT_READY),
        (404, 500, 200, DOWN),
    ],
)
async def test_an_engine_that_does_not_say_whether_it_is_ready_is_asked_otherwise(
    until: Until, ready: int, health: int, models: int, state: EndpointState
) -> None:
    engine = ScriptedEngine(ready)
    engine.statuses = {"/health": health, "/v1/models": models}
    async with engine.probed():
        await until(lambda: len(engine.states) == 2)
    assert engine.states[1] is state


async def test_a_gone_engine_is_watched_until_its_requests_are_over_or_another_has_its_address(until: Until) -> None:
    engine = ScriptedEngine(*[READY] * 100_000)
    endpoint = engine.registry.get(ENGINE.url)
    assert endpoint is not None
    engine.ledger.dispatch(a_request(), Placement(leg_on(endpoint, a_request(), {})), 0.0)
    successor = replace(ENGINE, uid="successor")
    async with engine.probed() as prober:
        prober.follow(frozenset())
        num_probes = len(engine.states)
        await until(lambda: len(engine.states) > num_probes + 2)
        assert prober.num_watched == 1
        prober.follow({successor})
        assert prober.num_watched == 2
        await until(lambda: prober.num_watched == 1)
    assert engine.ledger.has_in_flight(ENGINE.url)


async def test_an_idle_services_engines_are_probed_seldom(until: Until) -> None:
    engine, interval = ScriptedEngine(*[READY] * 100), 0.02
    async with engine.probed(interval):
        begin = asyncio.get_running_loop().time()
        await until(lambda: len(engine.states) >= 2)
        assert asyncio.get_running_loop().time() - begin > 4 * interval


async def test_an_idle_services_engines_are_probed_at_once_and_often_when_a_request_comes(
    until: Until,
) -> None:
    engine = ScriptedEngine(*[READY] * 100)
    async with engine.probed(times=SELDOM) as prober:
        await until(lambda: engine.num_listings == 1)
        prober.count_request()
        await until(lambda: len(engine.states) >= 6)


async def test_an_engine_is_asked_for_its_models_soon_again_until_it_has_listed_them(
    until: Until,
) -> None:
    engine = ScriptedEngine(*[READY] * 100)
    engine.models = b"no list of models"
    async with engine.probed(times=SELDOM):
        await until(lambda: len(engine.states) >= 4)


async def test_an_idle_services_engines_are_scraped_once(until: Until) -> None:
    engine = ScriptedEngine(*[READY] * 100)
    async with engine.probed() as prober:
        await until(lambda: len(engine.states) >= 4)
        assert engine.num_scrapes == 1
        prober.count_request()
        await until(lambda: engine.num_scrapes >= 4)


async def test_a_service_is_idle_some_time_after_its_last_request(until: Until) -> None:
    engine, stood_at = ScriptedEngine(*[READY] * 10_000), (0, 0)

    def has_been_probed_without_a_scrape() -> bool:
        """Several times."""
        nonlocal stood_at
        if engine.num_scrapes != stood_at[0]:
            stood_at = (engine.num_scrapes, len(engine.states))
        return len(engine.states) >= stood_at[1] + 3

    async with engine.probed(interval_seconds=0.01, times=ProbeTimes(idle_after=0.1)) as prober:
        prober.count_request()
        await until(lambda: engine.num_scrapes >= 3)
        await until(has_been_probed_without_a_scrape)


async def test_models_are_listed_more_seldom_than_an_engine_is_probed(until: Until) -> None:
    engine = ScriptedEngine(*[READY] * 11)
    async with engine.probed() as prober:
        prober.count_request()
        await until(lambda: len(engine.states) == 12)
    assert (engine.num_listings, engine.num_scrapes) == (3, 11)


async def test_an_engine_that_was_away_lists_its_models_when_it_is_back(until: Until) -> None:
    engine = ScriptedEngine(READY, LOADING, READY, READY)
    async with engine.probed() as prober:
        prober.count_request()
        await until(lambda: len(engine.states) == 5)
    assert engine.num_listings == 2


@pytest.mark.parametrize(("age_seconds", "num_scrapes"), [(-1e6, 0), (REPORT_LIFETIME_SECONDS + 1, 3)])
async def test_an_engine_is_not_scraped_while_it_tells_its_load_itself(
    until: Until, age_seconds: float, num_scrapes: int
) -> None:
    engine = ScriptedEngine(*[READY] * 3)
    endpoint = engine.registry.get(ENGINE.url)
    assert endpoint is not None
    report = LoadReport(1, 0, 0, 0, 100, 1000, 0.0, None, (), "one")
    endpoint.load.report(report, time.perf_counter() - age_seconds)
    async with engine.probed() as prober:
        prober.count_request()
        await until(lambda: len(engine.states) == 4)
    assert (engine.num_scrapes, engine.num_listings) == (num_scrapes, 1)
    assert endpoint.load.kv_usage == (0.5 if num_scrapes else 0.1)
