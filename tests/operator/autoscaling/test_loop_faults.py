"""Whom a fault touches: an error over one service, a Prometheus that hangs, a gateway that many services are behind."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults
from kvasir_operator.api.labels import SERVICE_LABEL
from kvasir_operator.autoscaling.decide import STALE_SECONDS
from kvasir_operator.autoscaling.held import Held
from kvasir_operator.autoscaling.ledger import ScalingLedger, ServiceScaling
from kvasir_operator.autoscaling.loop import Autoscaler, Clock
from kvasir_operator.autoscaling.prometheus import Prometheus, PrometheusAccess, Value
from kvasir_operator.autoscaling.situation import HoldReason
from kvasir_operator.kube.client import LabelSelector
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, Kind, KubeObject, ServiceKey
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.settings import OperatorSettings

from .fake_prometheus import FakePrometheus, of_fleet
from .test_loop import BEHIND, FULL, GATEWAY, KEY, NOW, gateway_pod, kube_with, pod, put_service

pytestmark = pytest.mark.anyio
BROKEN = ServiceKey("models", "broken")
WAIT_SECONDS = 30.0
Answer = Callable[[str], tuple[Any, int]]
HALF_FULL = FULL | {"kvasir_kv_cache_used_tokens": 500.0}
STEADY = of_fleet({"engine-0": HALF_FULL}, held=0, at=NOW)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class HangingPrometheus(Prometheus):
    """Answers as long as `hangs` is False."""

    hangs = False
    is_asked: asyncio.Event

    async def query(self, query: str) -> list[Value]:
        if not self.hangs:
            return await super().query(query)
        self.is_asked.set()
        await asyncio.Event().wait()
        return []


class FaultyKube(MemoryKube):
    """Whose objects of one service no code was written for; keeps the namespaces whose pods it was asked for."""

    def __init__(self, faulty: str | None = None) -> None:
        super().__init__()
        self.faulty = faulty
        self.asked: list[str | None] = []

    async def list(
        self, kind: Kind, namespace: str | None, labels: LabelSelector | None = None, fields: str | None = None
    ) -> list[KubeObject]:
        self.asked.append(namespace)
        if self.faulty is not None and (labels or {}).get(SERVICE_LABEL) == self.faulty:
            raise KeyError("nobody thought of this")
        return await super().list(kind, namespace, labels, fields)


class UnforeseenSpec(dict[str, Any]):
    """A spec that no code was written for."""

    def items(self) -> NoReturn:
        raise KeyError("nobody thought of this")

    def __iter__(self) -> NoReturn:
        raise KeyError("nobody thought of this")


class Scaling:
    """An autoscaler, what it did, and what it is told: `answer` by Prometheus, `held` by routers (None: nothing)."""

    def __init__(self, answer: Answer, held: Held | None) -> None:
        self.answer, self.held = answer, held
        self.ledger, self.metrics = ScalingLedger(), OperatorMetrics()
        self.woken: list[ServiceKey] = []
        self.is_woken, self.are_routers_asked = asyncio.Event(), asyncio.Event()
        self.num_router_questions = 0
        self.scaler: Autoscaler
        self.prometheus: HangingPrometheus

    def wake(self, key: ServiceKey) -> None:
        self.woken.append(key)
        self.is_woken.set()

    async def read_held(self, addresses: Iterable[str], service: str | None) -> Held | None:
        self.num_router_questions += 1
        self.are_routers_asked.set()
        return self.held

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"kvasir_operator_autoscaling_{name}", labels)


@asynccontextmanager
async def scaling(
    kube: MemoryKube,
    answer: Answer = STEADY,
    held: Held | None = None,
    gateway: GatewayDefaults | None = None,
    clock: Callable[[], float] = lambda: NOW,
    pods_clock: Callable[[], float] | None = None,
    prometheus_ahead: float = 0.0,
) -> AsyncIterator[Scaling]:
    """`pods_clock` None: the same as `clock`."""
    given = Scaling(answer, held)
    async with FakePrometheus(lambda query: given.answer(query), ahead_seconds=prometheus_ahead) as server:
        given.prometheus = HangingPrometheus(PrometheusAccess(server.url))
        given.prometheus.is_asked = asyncio.Event()
        defaults = InstallationDefaults(gateway=gateway)
        settings = OperatorSettings(prometheus_url=server.url, defaults=defaults, gateway_secret="secret")
        times = Clock(clock, lambda: "2027-01-15T08:00:00Z", pods_clock or clock)
        given.scaler = Autoscaler(
            kube, given.prometheus, given.ledger, settings, given.metrics, given.wake, times, given.read_held
        )
        try:
            yield given
        finally:
            await given.prometheus.close()


def soon(awaitable: Awaitable[Any]) -> Awaitable[Any]:
    return asyncio.wait_for(awaitable, WAIT_SECONDS)


async def test_a_fault_over_one_service_holds_that_one_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    kube = FaultyKube(BROKEN.name)
    put_service(kube, BROKEN.name, 3)
    put_service(kube, "llama", 1)
    full = of_fleet({"engine-0": FULL}, held=0, at=NOW)
    async with scaling(kube, full) as given:
        await given.scaler.turn()
        assert given.ledger.scaling_of(KEY).replicas == {"serve": 2}
        verdict = given.ledger.scaling_of(BROKEN).verdicts["serve"]
        assert (verdict.replicas, verdict.held) == (3, HoldReason.DECISION_FAILED)
        trouble = given.ledger.scaling_of(BROKEN).trouble
        assert trouble is not None
        assert "KeyError" in trouble.message
        assert sorted(given.woken) == [BROKEN, KEY]
        of_broken = {"service_namespace": "models", "inference_service": "broken", "role": "serve"}
        assert given.metric("held", **of_broken) == 1
        assert given.metric("errors_total", error="KeyError") == 1
        [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert record.getMessage().startswith("models/broken: not scaled")
        assert record.exc_info is not None


async def test_what_failed_is_decided_again_at_the_next_turn() -> None:
    kube = FaultyKube(KEY.name)
    put_service(kube, KEY.name, 1)
    async with scaling(kube) as given:
        await given.scaler.turn()
        kube.faulty = None
        await given.scaler.turn()
        assert given.ledger.scaling_of(KEY).trouble is None
        assert given.woken == [KEY, KEY]


async def test_a_fault_before_a_services_roles_are_known_holds_what_was_decided() -> None:
    kube = FaultyKube()
    put_service(kube, KEY.name, 1)
    async with scaling(kube, of_fleet({"engine-0": FULL}, held=0, at=NOW)) as given:
        await given.scaler.turn()
        stored = kube.objects[(INFERENCE_SERVICE.kind, *KEY)]
        stored["spec"] = UnforeseenSpec(stored["spec"])
        await given.scaler.turn()
        verdict = given.ledger.scaling_of(KEY).verdicts["serve"]
        assert (verdict.replicas, verdict.held) == (2, HoldReason.DECISION_FAILED)


async def test_a_service_that_is_deleted_while_it_is_held_leaves_nothing_behind() -> None:
    kube = FaultyKube(KEY.name)
    put_service(kube, KEY.name, 1)
    async with scaling(kube) as given:
        await given.scaler.turn()
        del kube.objects[(INFERENCE_SERVICE.kind, *KEY)]
        await given.scaler.turn()
        of_deleted = {"service_namespace": "models", "inference_service": "llama", "role": "serve"}
        assert given.metric("held", **of_deleted) is None
        assert given.ledger.scaling_of(KEY) == ServiceScaling()


async def test_a_fault_between_turns_waits_for_the_next_turn() -> None:
    kube = FaultyKube()
    put_service(kube, KEY.name, 0)
    async with scaling(kube, held=Held(0, 0)) as given:
        await given.scaler.turn()
        kube.faulty = KEY.name
        await given.scaler.turn_asleep()
        await given.scaler.turn_asleep()
        assert given.metric("errors_total", error="KeyError") == 1
        assert given.ledger.scaling_of(KEY).replicas == {"serve": 0}


async def test_a_pass_is_called_for_when_the_reason_of_trouble_changes_and_not_its_text() -> None:
    def refusal(text: str) -> Answer:
        return lambda query: ({"status": "error", "error": text}, 503)

    stale = of_fleet({"engine-0": HALF_FULL}, held=0, at=NOW - STALE_SECONDS - 1)
    async with scaling(kube_with(1)) as given:
        seen = []
        for given.answer in (STEADY, refusal("down"), refusal("still down"), stale, STEADY, STEADY):
            await given.scaler.turn()
            trouble = given.ledger.scaling_of(KEY).trouble
            seen.append((None if trouble is None else trouble.reason.value, len(given.woken)))
        assert seen == [
            (None, 0),
            ("MetricsUnavailable", 1),
            ("MetricsUnavailable", 1),
            ("MetricsStale", 2),
            (None, 3),
            (None, 3),
        ]


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
@pytest.mark.parametrize(("age", "trouble"), [(STALE_SECONDS - 5, None), (STALE_SECONDS + 5, "MetricsStale")])
async def test_how_old_a_sample_is_prometheus_own_clock_tells(ahead: float, age: float, trouble: str | None) -> None:
    answer = of_fleet({"engine-0": HALF_FULL}, held=0, at=NOW + ahead - age)
    async with scaling(kube_with(1), answer, prometheus_ahead=ahead) as given:
        await given.scaler.turn()
        seen = given.ledger.scaling_of(KEY).trouble
        assert (None if seen is None else seen.reason.value) == trouble


async def test_since_when_pods_serve_the_api_servers_clock_tells() -> None:
    """Of one that has served for long, series are missed."""
    operators_clock = NOW - 1e8
    answer = of_fleet({}, held=0, at=operators_clock)
    async with scaling(kube_with(1), answer, clock=lambda: operators_clock, pods_clock=lambda: NOW) as given:
        await given.scaler.turn()
        trouble = given.ledger.scaling_of(KEY).trouble
        assert trouble is not None
        assert trouble.reason.value == "MetricsMissing"


async def test_a_request_wakes_its_service_while_prometheus_hangs() -> None:
    kube = kube_with(0)
    put_service(kube, "busy", 1)
    async with scaling(kube, held=Held(0, 0)) as given:
        given.prometheus.hangs = True
        running = asyncio.create_task(given.scaler.run(interval_seconds=3600.0, asleep_interval_seconds=0.001))
        try:
            await soon(given.prometheus.is_asked.wait())
            await soon(given.are_routers_asked.wait())
            assert given.woken == []
            given.held = Held(1, 20)
            await soon(given.is_woken.wait())
        finally:
            running.cancel()
        assert given.woken == [KEY]
        assert given.ledger.scaling_of(KEY).replicas == {"serve": 1}


async def test_a_turn_that_hangs_with_as_many_services_as_are_measured_at_once_keeps_none_from_waking() -> None:
    kube = MemoryKube()
    for number in range(8):
        put_service(kube, f"busy-{number}", 1)
    put_service(kube, "llama", 0)
    async with scaling(kube, held=Held(0, 0)) as given:
        await given.scaler.turn()
        given.prometheus.hangs = True
        turn = asyncio.create_task(given.scaler.turn())
        await soon(given.prometheus.is_asked.wait())
        given.held, given.woken = Held(1, 20), []
        await soon(given.scaler.turn_asleep())
        turn.cancel()
        assert given.woken == [KEY]


async def test_the_gateways_pods_are_listed_once_a_turn_for_all_services_behind_it() -> None:
    kube = FaultyKube()
    for name in ("llama", "qwen", "phi"):
        put_service(kube, name, 0, **BEHIND)
    kube.objects[("Pod", "serving", "gateway-0")] = gateway_pod("gateway-0")
    async with scaling(kube, held=Held(0, 0), gateway=GATEWAY) as given:
        await given.scaler.turn()
        assert (kube.asked.count("serving"), given.num_router_questions) == (1, 3)
        await given.scaler.turn_asleep()
        assert (kube.asked.count("serving"), given.num_router_questions) == (2, 6)


SCALED = {"autoscaling": {"minReplicas": 0, "maxReplicas": 8}}
STATIC = {"replicas": 1}


def split(prefill: int, decode: int, decode_spec: dict[str, Any] = SCALED) -> MemoryKube:
    """So many pods of each role, `ROLE-0` and so on; prefill is scaled in any case."""
    kube = kube_with(0)
    stored = kube.objects[(INFERENCE_SERVICE.kind, *KEY)]
    stored["spec"] = {"model": {"source": "pvc://claim"}, "disaggregation": {"prefill": SCALED, "decode": decode_spec}}
    desired = {"prefill": prefill, "decode": decode}
    stored["status"]["roles"] = [{"role": role, "desired": number} for role, number in desired.items()]
    for role, number in desired.items():
        for index in range(number):
            kube.objects[("Pod", "models", f"{role}-{index}")] = pod(f"{role}-{index}", role)
    return kube


OF_DECODE = {"service_namespace": "models", "inference_service": "llama", "role": "decode"}


def down(query: str) -> tuple[Any, int]:
    return {"status": "error", "error": "down"}, 503


async def test_decode_at_zero_is_woken_by_routers_alone_though_prefill_runs() -> None:
    async with scaling(split(prefill=1, decode=0), down, held=Held(0, 0)) as given:
        await given.scaler.turn()
        await given.scaler.turn_asleep()
        assert given.ledger.scaling_of(KEY).replicas == {"prefill": 1, "decode": 0}
        given.held = Held(1, 20)
        await given.scaler.turn_asleep()
        scaled = given.ledger.scaling_of(KEY)
        assert scaled.replicas == {"prefill": 1, "decode": 1}
        assert scaled.verdicts["prefill"].held is HoldReason.METRICS_UNAVAILABLE
        [entry] = scaled.entries
        assert (entry["role"], entry["from"], entry["to"], entry["reason"]) == ("decode", 0, 1, "HeldRequests")
        asked = given.num_router_questions
        await given.scaler.turn_asleep()
        assert given.num_router_questions == asked, "nobody is at zero"


@pytest.mark.parametrize("decode_spec", [STATIC, SCALED], ids=["not scaled", "scaled"])
@pytest.mark.parametrize(("num_running", "expected"), [(0.0, 0), (1.0, 1)])
async def test_prefill_at_zero_wakes_when_decode_serves(
    num_running: float, expected: int, decode_spec: dict[str, Any]
) -> None:
    busy = of_fleet({"decode-0": HALF_FULL | {"kvasir_num_requests_running": num_running}}, held=0, at=NOW)
    async with scaling(split(prefill=0, decode=1, decode_spec=decode_spec), busy, held=Held(0, 0)) as given:
        await given.scaler.turn()
        await given.scaler.turn_asleep()
        scaled = given.ledger.scaling_of(KEY)
        assert scaled.replicas["prefill"] == expected
        assert scaled.replicas.keys() == ({"prefill"} if decode_spec is STATIC else {"prefill", "decode"})
        assert given.metric("wanted_replicas", **OF_DECODE) == (None if decode_spec is STATIC else 1)
        assert given.num_router_questions == 0, "decode serves"


@pytest.mark.parametrize(("pauses", "expected"), [((50, 50, 50), 2), ((15, 50, 50, 50), 2), ((15, 100, 15), 4)])
async def test_turns_that_are_far_apart_shrink_a_role_and_one_pause_does_not(
    pauses: tuple[float, ...], expected: int
) -> None:
    now = NOW
    idle = FULL | {"kvasir_kv_cache_used_tokens": 1.0}

    def answer(query: str) -> tuple[Any, int]:
        return of_fleet({f"engine-{index}": idle for index in range(4)}, held=0, at=now)(query)

    async with scaling(kube_with(4), answer, clock=lambda: now) as given:
        await given.scaler.turn()
        for pause in pauses:
            now += pause
            await given.scaler.turn()
        assert given.ledger.scaling_of(KEY).replicas == {"serve": expected}
