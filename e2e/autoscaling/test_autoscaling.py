"""Verdict by traffic: replicas follow what a real Prometheus measures, to zero and back, and hold while it is away."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from e2e.cluster.rig import faults
from e2e.cluster.rig.prometheus_queries import URL_FOR_PODS, query
from e2e.conftest import Deploy, StartLoad, install_operator
from e2e.helm.helm import Helm
from e2e.live_cluster import POLL_SECONDS, KubeObject, LiveCluster, LiveService
from e2e.traffic.answers import answers
from e2e.traffic.traffic import Verdict
from e2e.verdicts import Verdicts
from tests.controlplane.processes import wait_until

SLEEPY, SLEEPY_SPLIT = (Path(__file__).parent / f"{name}.yaml" for name in ("sleepy", "sleepy_split"))
NUM_TOKENS = 800
NUM_HEAVY = 5
"""Clients besides the one that streams throughout."""
MOST_REPLICAS = 3
OUTAGE_SECONDS = 45.0
"""Without load: thrice the service's window of scaling down."""
SCALED_WITHIN_SECONDS = 120.0
IDLE_WITHIN_SECONDS = 240.0
"""After a request rates are zero a minute later; then come the service's own ten seconds."""
NUM_WAKES = 3
NUM_GIVEN = 100
"""Tokens of the prompts that wake a service: more than remotePrefillMinTokens."""

pytestmark = pytest.mark.usefixtures("rig")


@pytest.fixture(scope="module", autouse=True)
def scaling_operator(kvasir: Helm, live_cluster: LiveCluster) -> Iterator[None]:
    """The operator reads the rig's Prometheus, and no longer afterwards."""
    if live_cluster.get("namespace", "monitoring") is None:
        pytest.skip("needs a cluster of `e2e/cluster/up --prometheus`")
    install_operator(kvasir, f"--set=prometheus.url={URL_FOR_PODS}")
    yield
    install_operator(kvasir)


@contextmanager
def prometheus_stopped() -> Iterator[None]:
    """Answers again afterwards."""
    faults.stop("prometheus")
    try:
        yield
    finally:
        faults.start("prometheus")
        wait_until(prometheus_answers, 30, "Prometheus to answer")


def prometheus_answers() -> bool:
    try:
        return bool(query("vector(1)"))
    except OSError:
        return False


def num_wanted(service: LiveService) -> dict[str, int]:
    """By engine role."""
    return {each["role"]: each["desired"] for each in service.status.get("roles", []) if each["role"] != "router"}


def num_ready(service: LiveService) -> dict[str, int]:
    return {each["role"]: each["ready"] for each in service.status.get("roles", []) if each["role"] != "router"}


def wait_replicas(service: LiveService, replicas: int, seconds: float) -> float:
    """Until so many are wanted, are ready and no other pod is left; returns the seconds that it took."""
    begin = time.monotonic()

    def is_reached() -> bool:
        wanted, ready = num_wanted(service), num_ready(service)
        pods = [pod for role in wanted for pod in service.pods(role)]
        return set(wanted.values()) == set(ready.values()) == {replicas} and len(pods) == replicas * len(wanted)

    try:
        wait_until(is_reached, seconds, f"{replicas} replicas of {service.name}", POLL_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {service.status}") from error
    return time.monotonic() - begin


def wait_scaling_active(service: LiveService, status: str, reason: str, seconds: float) -> float:
    """Until the condition is so; returns the seconds that it took."""
    begin = time.monotonic()

    def holds(condition: KubeObject) -> bool:
        return (condition.get("status"), condition.get("reason")) == (status, reason)

    service.wait_condition("ScalingActive", holds, seconds)
    return time.monotonic() - begin


def decisions(service: LiveService) -> list[tuple[int, int, str]]:
    """From, to and why; as the status shows them, oldest first."""
    return [(each["from"], each["to"], each["reason"]) for each in service.status["scaling"]]


def event_reasons(service: LiveService) -> set[str]:
    events = service.cluster.list("events", service.namespace)
    return {event["reason"] for event in events if event["involvedObject"]["kind"] == "InferenceService"}


def decisions_counted(service: LiveService) -> float:
    """By the operators, as Prometheus knows."""
    own = f'service_namespace="{service.namespace}", inference_service="{service.name}"'
    samples = query(f"sum(kvasir_operator_autoscaling_decisions_total{{{own}}})")
    return samples[0].value if samples else 0.0


def test_replicas_follow_load_and_hold_while_prometheus_is_away(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    streams = answers(NUM_TOKENS)
    with start_load(own_service, streams, num_clients=1, name="light") as light:
        with start_load(own_service, streams, num_clients=NUM_HEAVY, name="heavy") as heavy:
            grown = wait_replicas(own_service, MOST_REPLICAS, SCALED_WITHIN_SECONDS)
            heavy.wait_streams(NUM_HEAVY)
            with prometheus_stopped():
                told = wait_scaling_active(own_service, "False", "MetricsUnavailable", 60)
                heavy_verdict = heavy.stop()
                begin, former = time.monotonic(), own_service.staying_uids("serve")
                while time.monotonic() - begin < OUTAGE_SECONDS:
                    light.wait_streams(1)
                assert num_wanted(own_service) == {"serve": MOST_REPLICAS}
                assert own_service.staying_uids("serve") == former
        recovered = wait_scaling_active(own_service, "True", "FollowingDemand", 60)
        shrunk = wait_replicas(own_service, 1, SCALED_WITHIN_SECONDS)
        light.wait_streams(1)
        verdict = Verdict((*heavy_verdict.outcomes, *light.stop().outcomes))
    made = decisions(own_service)
    verdicts.add(
        "autoscaling: up, Prometheus stopped, down",
        verdict,
        f"{', '.join(f'{before} to {after} ({why})' for before, after, why in made)}",
        ready_after_load=grown,
        condition_after_stop=told,
        condition_after_start=recovered,
        down_after_start=recovered + shrunk,
    )
    assert not verdict.failures, verdict
    assert made[0][0] == 1
    assert {why for _, _, why in made} >= {"KVCacheDemand", "LowDemand"}
    assert event_reasons(own_service) >= {"KVCacheDemand", "LowDemand", "MetricsUnavailable"}
    wait_until(lambda: decisions_counted(own_service) >= len(made), 30, "the operator's metric to count decisions")


def test_a_service_goes_to_zero_stays_listed_and_answers_the_next_request(
    own_service: LiveService, start_load: StartLoad, verdicts: Verdicts
) -> None:
    own_service.patch({"autoscaling": {"minReplicas": 0}})
    emptied = wait_replicas(own_service, 0, IDLE_WITHIN_SECONDS)
    assert own_service.condition("Ready")["reason"] == "Idle"
    name, namespace = f"inferenceservice/{own_service.name}", f"--namespace={own_service.namespace}"
    own_service.cluster.kubectl("wait", "--for=condition=Ready", name, namespace)
    with own_service.port_forward() as url, openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert own_service.model in {model.id for model in client.models.list()}
    with start_load(own_service, answers(200), num_clients=2) as load:
        load.wait_streams(2)
        verdict = load.stop()
    _, first_token = verdict.first_token_seconds
    verdicts.add(
        "autoscaling: to zero and back", verdict, zero_after_patch=emptied, first_token_of_the_wake=first_token
    )
    assert not verdict.failures, verdict
    assert [(before, after) for before, after, _ in decisions(own_service)][-2:] == [(1, 0), (0, 1)]
    assert {"Idle", "HeldRequests"} <= event_reasons(own_service)


def test_the_first_request_wakes_services_of_one_role_and_of_two_with_and_without_prometheus(
    deploy: Deploy, start_load: StartLoad, verdicts: Verdicts
) -> None:
    single = [deploy(SLEEPY, name=f"sleepy-{number}") for number in range(NUM_WAKES)]
    split = deploy(SLEEPY_SPLIT)
    for service in (*single, split):
        wait_replicas(service, 0, IDLE_WITHIN_SECONDS)
    with prometheus_stopped():
        woken = [wake(single[0], start_load)]
    woken += [wake(service, start_load) for service in single[1:]]
    of_both_roles = wake(split, start_load)
    seconds = [verdict.first_token_seconds[1] for verdict in woken]
    verdict = Verdict(tuple(outcome for each in (*woken, of_both_roles) for outcome in each.outcomes))
    verdicts.add(
        f"autoscaling: {NUM_WAKES} wakes from zero, the first without Prometheus, and one of prefill and decode",
        verdict,
        p50_to_the_first_token=statistics.median(seconds),
        longest=max(seconds),
        of_both_roles=of_both_roles.first_token_seconds[1],
    )
    assert not verdict.failures, verdict
    assert num_wanted(split) == {"prefill": 1, "decode": 1}


def wake(service: LiveService, start_load: StartLoad) -> Verdict:
    """One client's streams, of which the first was held."""
    name = f"client-of-{service.name}"
    with start_load(service, answers(40, num_given=NUM_GIVEN), num_clients=1, name=name) as load:
        return load.stop()
