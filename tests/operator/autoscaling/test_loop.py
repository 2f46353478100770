"""A turn of the loop against a Prometheus that is there, and one that is not."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from tests.operator.cluster_objects import service
from tests.operator.memory_kube import MemoryKube

from kvasir_operator.api.defaults import GatewayDefaults, InstallationDefaults
from kvasir_operator.api.labels import ROLE_LABEL, SERVICE_LABEL
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.held import Held
from kvasir_operator.autoscaling.ledger import ScalingLedger, ServiceScaling
from kvasir_operator.autoscaling.loop import Autoscaler, Clock
from kvasir_operator.autoscaling.prometheus import Prometheus, PrometheusAccess
from kvasir_operator.autoscaling.situation import HoldReason
from kvasir_operator.errors import KubeForbiddenError
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, POD, Kind, KubeObject, ServiceKey
from kvasir_operator.metrics import OperatorMetrics
from kvasir_operator.settings import OperatorSettings

from .fake_prometheus import FakePrometheus, engine_labels, of_fleet, vector

KEY = ServiceKey("models", "llama")
NOW = 1_800_000_000.0
CREATED, READY = "2026-11-20T10:00:00Z", "2026-11-20T10:01:00Z"
FULL = {"kvasir_kv_cache_capacity_tokens": 1000.0, "kvasir_kv_cache_used_tokens": 900.0}


def pod(name: str, role: str, of_service: str = "llama") -> dict[str, Any]:
    labels = {SERVICE_LABEL: of_service, ROLE_LABEL: role}
    metadata = {"name": name, "namespace": "models", "uid": name, "labels": labels, "creationTimestamp": CREATED}
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": READY}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "status": {"conditions": [ready], "podIP": "10.0.0.1"},
    }


def kube_with(desired: int, progressing: str = "RolloutComplete", **spec: Any) -> MemoryKube:
    kube = MemoryKube()
    put_service(kube, "llama", desired, progressing, **spec)
    return kube


def put_service(kube: MemoryKube, name: str, desired: int, progressing: str = "RolloutComplete", **spec: Any) -> None:
    """With its pods: `NAME-engine-0` and so on, but of llama without its name."""
    status = {
        "observedGeneration": 3,
        "roles": [{"role": "serve", "desired": desired}],
        "conditions": [{"type": "Progressing", "status": "False", "reason": progressing}],
    }
    autoscaling = {"minReplicas": 0, "maxReplicas": 8}
    full = {"model": {"source": "pvc://claim"}, "autoscaling": autoscaling} | spec
    kube.objects[(INFERENCE_SERVICE.kind, "models", name)] = service(name, status=status) | {"spec": full}
    prefix = "" if name == "llama" else f"{name}-"
    roles = {**{f"engine-{index}": "serve" for index in range(desired)}, "router-0": "router"}
    for pod_name, role in roles.items():
        kube.objects[("Pod", "models", prefix + pod_name)] = pod(prefix + pod_name, role, name)


class Turn:
    """One, by an autoscaler of its own."""

    def __init__(
        self,
        kube: MemoryKube,
        answer: Any,
        held: Held | None = None,
        gateway: GatewayDefaults | None = None,
        then: dict[str, Any] | None = None,
    ) -> None:
        """`held`: what routers say themselves; None: nothing. `then`: the service's spec for one turn more."""
        self.held, self.asked_routers = held, list[tuple[list[str], str | None]]()
        self.ledger, self.woken = ScalingLedger(), list[ServiceKey]()
        self.metrics = OperatorMetrics()
        self._defaults = InstallationDefaults(gateway=gateway)
        asyncio.run(self._run(kube, answer, then))

    async def _run(self, kube: MemoryKube, answer: Any, then: dict[str, Any] | None) -> None:
        async with FakePrometheus(answer) as server:
            prometheus = Prometheus(PrometheusAccess(server.url))
            clock = Clock(lambda: NOW, lambda: "2027-01-15T08:00:00Z", lambda: NOW)
            settings = OperatorSettings(prometheus_url=server.url, defaults=self._defaults, gateway_secret="secret")
            scaler = Autoscaler(
                kube, prometheus, self.ledger, settings, self.metrics, self.woken.append, clock, self._read_held
            )
            try:
                await scaler.turn()
                await scaler.turn_asleep()
                if then is not None:
                    kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["spec"] = then
                    await scaler.turn()
            finally:
                await prometheus.close()

    async def _read_held(self, addresses: Iterable[str], service: str | None) -> Held | None:
        self.asked_routers.append((list(addresses), service))
        return self.held

    @property
    def scaling(self) -> ServiceScaling:
        return self.ledger.scaling_of(KEY)

    def metric(self, name: str, **labels: str) -> float | None:
        own = {"service_namespace": "models", "inference_service": "llama", "role": "serve"}
        return self.metrics.registry.get_sample_value(f"kvasir_operator_autoscaling_{name}", own | labels)


def test_a_decision_is_recorded_counted_and_carried_out_by_a_pass() -> None:
    turn = Turn(kube_with(1), of_fleet({"engine-0": FULL, "gone": FULL}, held=0, at=NOW))
    assert turn.scaling.replicas == {"serve": 2}
    [entry] = turn.scaling.entries
    assert (entry["from"], entry["to"], entry["reason"], entry["role"]) == (1, 2, "KVCacheDemand", "serve")
    assert turn.woken == [KEY]
    assert turn.metric("wanted_replicas") == 2
    assert turn.metric("needed_replicas") == pytest.approx(900 / 750)
    assert turn.metric("decisions_total", reason="KVCacheDemand") == 1
    assert turn.metric("held") == 0


def test_a_turn_that_changes_nothing_wakes_nobody() -> None:
    idle = FULL | {"kvasir_kv_cache_used_tokens": 500.0}
    turn = Turn(kube_with(1), of_fleet({"engine-0": idle}, held=0, at=NOW))
    assert (turn.woken, turn.scaling.entries, turn.scaling.replicas) == ([], (), {"serve": 1})


def test_changes_that_have_not_been_made_count_as_none() -> None:
    """Prometheus sees no increase in a series that begins with 1."""
    turn = Turn(kube_with(1), of_fleet({"engine-0": FULL | {"kvasir_kv_cache_used_tokens": 500.0}}, held=0, at=NOW))
    assert [turn.metric("decisions_total", reason=reason) for reason in ScalingReason] == [0.0] * len(ScalingReason)


def test_a_role_that_is_no_longer_scaled_leaves_no_series() -> None:
    roles = {"prefill": {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}}, "decode": {"replicas": 1}}
    split = {"model": {"source": "pvc://claim"}, "disaggregation": roles}
    turn = Turn(kube_with(1), of_fleet({"engine-0": FULL}, held=0, at=NOW), then=split)
    assert turn.metric("wanted_replicas") is None
    assert turn.metric("wanted_replicas", role="prefill") is not None


def test_services_at_zero_whose_routers_do_not_answer_wait_for_the_next_turn() -> None:
    asked: list[str] = []

    def answer(query: str) -> Any:
        asked.append(query)
        return of_fleet({}, held=0, at=NOW)(query)

    turn = Turn(kube_with(0), answer)
    assert len(turn.asked_routers) == 2, "by the turn, and by the look that follows it"
    assert len(asked) == len(set(asked)), "of which the turn alone asks Prometheus"


def test_a_held_request_wakes_a_service_at_zero() -> None:
    turn = Turn(kube_with(0), of_fleet({}, held=1, at=NOW))
    assert turn.scaling.replicas == {"serve": 1}
    assert turn.scaling.entries[0]["reason"] == "HeldRequests"


def test_a_service_at_zero_is_woken_by_what_its_routers_say_themselves_without_prometheus() -> None:
    turn = Turn(kube_with(0), lambda query: pytest.fail(query), held=Held(1, 20))
    assert turn.asked_routers[0] == (["10.0.0.1"], None)
    assert turn.scaling.replicas == {"serve": 1}
    assert turn.woken == [KEY]


def test_a_service_at_zero_is_asked_about_between_turns_and_stays_while_nothing_is_held() -> None:
    turn = Turn(kube_with(0), lambda query: pytest.fail(query), held=Held(0, 0))
    assert len(turn.asked_routers) == 2
    assert (turn.scaling.replicas, turn.woken) == ({"serve": 0}, [])


GATEWAY = GatewayDefaults("serving", "kvasir-gateway", {"app": "gateway"})
BEHIND = {"router": {"mode": "gateway"}}


def gateway_pod(name: str) -> dict[str, Any]:
    made = pod(name, "router")
    made["metadata"] |= {"namespace": "serving", "labels": {"app": "gateway"}}
    return made


def test_behind_the_gateway_its_pods_are_asked_for_the_service_by_name() -> None:
    kube = kube_with(0, **BEHIND)
    kube.objects[("Pod", "serving", "gateway-0")] = made = gateway_pod("gateway-0")
    made["status"]["podIP"] = "10.0.0.9"
    turn = Turn(kube, lambda query: pytest.fail(query), held=Held(1, 20), gateway=GATEWAY)
    assert turn.asked_routers[0] == (["10.0.0.9"], "models/llama")
    assert turn.scaling.replicas == {"serve": 1}


@pytest.mark.parametrize(("holder", "grows"), [("gone", False), ("gateway-0", True)])
def test_what_a_removed_gateway_pod_held_does_not_count(holder: str, grows: bool) -> None:
    kube = kube_with(1, **BEHIND)
    kube.objects[("Pod", "serving", "gateway-0")] = gateway_pod("gateway-0")

    def answer(query: str) -> Any:
        if "kvasir_router_" not in query or "timestamp(" in query:
            pods = {"engine-0": FULL | {"kvasir_kv_cache_used_tokens": 500.0}}
            return of_fleet(pods, held=0, at=NOW, router="gateway-0")(query)
        held = {name: 1e6 if name == holder else 0.0 for name in ("gateway-0", "gone")}
        return vector(*(({"service": "models/llama", "pod": name}, number) for name, number in held.items())), 200

    turn = Turn(kube, answer, gateway=GATEWAY)
    assert turn.scaling.trouble is None
    assert (turn.scaling.replicas["serve"] > 1) is grows


def test_one_router_of_two_that_is_not_scraped_holds_and_the_service_is_told() -> None:
    kube = kube_with(1)
    kube.objects[("Pod", "models", "router-1")] = pod("router-1", "router")
    turn = Turn(kube, of_fleet({"engine-0": FULL}, held=0, at=NOW))
    assert turn.scaling.replicas == {"serve": 1}
    assert turn.scaling.trouble is not None
    assert turn.scaling.trouble.message == "serve stays at 1: Prometheus has no series of router-1"


class _OwnNamespaceKube(MemoryKube):
    async def list(self, kind: Kind, namespace: str | None, *arguments: Any, **options: Any) -> list[KubeObject]:
        if kind == POD and namespace != "models":
            raise KubeForbiddenError("pods is forbidden", 403)
        return await super().list(kind, namespace, *arguments, **options)


def test_where_the_gateways_pods_may_not_be_seen_prometheus_wakes_the_service() -> None:
    kube = _OwnNamespaceKube()
    kube.objects = kube_with(0, **BEHIND).objects
    turn = Turn(kube, of_fleet({}, held=1, at=NOW), held=Held(1, 20), gateway=GATEWAY)
    assert turn.asked_routers == []
    assert turn.scaling.replicas == {"serve": 1}


def test_a_service_that_runs_is_not_asked_about_between_turns() -> None:
    turn = Turn(kube_with(1), of_fleet({"engine-0": FULL}, held=0, at=NOW), held=Held(1, 20))
    assert turn.asked_routers == []


@pytest.mark.parametrize("num_others", [0, 9])
def test_prometheus_is_asked_as_often_for_ten_services_as_for_one(num_others: int) -> None:
    asked = list[str]()

    def answer(query: str) -> tuple[Any, int]:
        asked.append(query)
        return of_fleet({"engine-0": FULL}, held=0, at=NOW)(query)

    kube = kube_with(1)
    for number in range(num_others):
        put_service(kube, f"other-{number}", 1)
    turn = Turn(kube, answer)
    assert turn.scaling.replicas == {"serve": 2}
    assert len(asked) == 21


def test_without_prometheus_replicas_stay_and_the_service_is_told() -> None:
    turn = Turn(kube_with(3), lambda _: ({"status": "error", "error": "down"}, 503))
    verdict = turn.scaling.verdicts["serve"]
    assert (verdict.replicas, verdict.held) == (3, HoldReason.METRICS_UNAVAILABLE)
    assert turn.scaling.trouble is not None
    assert turn.woken == [KEY]
    assert turn.metric("held") == 1


@pytest.mark.parametrize("reason", ["RolloutInProgress", "RolloutPaused", "RolloutHalted", None])
def test_replicas_grow_during_a_rollout_and_before_a_pass_has_seen_the_spec(reason: str | None) -> None:
    kube = kube_with(1, *filter(None, [reason]))
    if reason is None:
        kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["metadata"]["generation"] = 4
    turn = Turn(kube, of_fleet({"engine-0": FULL}, held=0, at=NOW))
    assert turn.scaling.verdicts["serve"].replicas == 2


@pytest.mark.parametrize("reason", ["RolloutInProgress", "RolloutPaused", "RolloutHalted"])
def test_without_prometheus_the_service_is_told_during_a_rollout_too(reason: str) -> None:
    turn = Turn(kube_with(3, reason), lambda _: ({"status": "error", "error": "down"}, 503))
    assert turn.scaling.trouble is not None
    assert turn.metric("held") == 1


@pytest.mark.parametrize("spec", [{"autoscaling": None}, {"suspend": True}, {"model": {"source": "nonsense"}}])
def test_what_is_not_to_be_scaled_is_not_even_asked_about(spec: dict[str, Any]) -> None:
    kube = kube_with(1)
    stored = kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["spec"] | spec
    kube.objects[(INFERENCE_SERVICE.kind, *KEY)]["spec"] = {k: v for k, v in stored.items() if v is not None}
    turn = Turn(kube, lambda query: pytest.fail(query))
    assert turn.scaling == ServiceScaling()


def test_rates_and_latencies_come_from_their_queries() -> None:
    def answer(query: str) -> tuple[Any, int]:
        if query.startswith("histogram_quantile") and "inter_token" in query:
            return vector((engine_labels(""), 0.2)), 200
        return of_fleet({"engine-0": FULL | {"kvasir_kv_cache_used_tokens": 10.0}}, held=0, at=NOW)(query)

    slo = {"interTokenLatency": "100ms"}
    turn = Turn(kube_with(1, autoscaling={"maxReplicas": 8, "slo": slo}), answer)
    assert turn.scaling.entries[0]["reason"] == "InterTokenLatency"
