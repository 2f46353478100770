"""What the conditions of a service behind the gateway say: of the gateway, and of the names that it has there."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.operator.cluster_objects import deployment, pod
from tests.operator.status.service_under_test import SETTLED, KubeObject, condition, derived, find

from kvasir_operator.autoscaling.ledger import ServiceScaling
from kvasir_operator.kube.kinds import ServiceKey
from kvasir_operator.observe.model_names import GatewayState
from kvasir_operator.status.conditions import Situation
from kvasir_operator.status.problems import find_problems

ENGINES = [pod("e1"), pod("e2")]
LOADING = [pod("e1", ready=False), pod("e2", ready=False)]
OWNER = ServiceKey("models", "older")
NAMES = ("llama-8b", "small")
READY = GatewayState(is_ready=True, names=NAMES)
TAKEN: Mapping[str, ServiceKey] = {"llama-8b": OWNER}
ALL_TAKEN: Mapping[str, ServiceKey] = dict.fromkeys(NAMES, OWNER)


def situation(gateway: GatewayState) -> Situation:
    """With the problems that a pass finds."""
    return replace(SETTLED, gateway=gateway, problems=find_problems([], [], [], [], gateway))


def status_behind(gateway: GatewayState, pods: list[KubeObject], num_engines: int = 2) -> KubeObject:
    return derived([deployment(replicas=num_engines)], pods, situation(gateway))


def test_it_serves_without_a_router_of_its_own() -> None:
    status = status_behind(READY, ENGINES)
    assert [(each["type"], each["status"], each["reason"]) for each in status["conditions"]] == [
        ("Ready", "True", "Serving"),
        ("ModelLoaded", "True", "ModelLoaded"),
        ("Routable", "True", "GatewayReady"),
        ("Progressing", "False", "RolloutComplete"),
        ("Degraded", "False", "AsExpected"),
    ]
    assert find(status, "Routable")["message"] == "the gateway is ready and serves llama-8b, small"
    assert [role["role"] for role in status["roles"]] == ["serve"]


def test_it_is_not_ready_while_the_gateway_is_not_and_nothing_of_its_own_is_wrong() -> None:
    status = status_behind(GatewayState(is_ready=False, names=NAMES), ENGINES)
    for name in ("Ready", "Routable"):
        assert condition(status, name) == ("False", "GatewayNotReady")
    assert condition(status, "ModelLoaded") == ("True", "ModelLoaded")
    assert condition(status, "Degraded") == ("False", "AsExpected")


def test_engines_that_load_are_waited_for_as_behind_any_router() -> None:
    status = status_behind(READY, LOADING)
    assert condition(status, "Ready") == ("False", "LoadingModel")
    assert condition(status, "Routable") == ("False", "NoReadyEngine")


def test_at_zero_the_gateway_takes_the_request_that_wakes_it() -> None:
    asleep = replace(situation(READY), scaling=ServiceScaling())
    assert condition(derived([deployment(replicas=0)], [], asleep), "Ready") == ("True", "Idle")
    away = GatewayState(is_ready=False, names=NAMES)
    assert condition(status_behind(away, [], num_engines=0), "Ready") == ("False", "GatewayNotReady")


def test_a_name_that_an_older_service_has_is_told_with_its_owner_and_the_others_are_served() -> None:
    status = status_behind(replace(READY, taken=TAKEN), ENGINES)
    assert condition(status, "Ready") == ("True", "Serving")
    assert find(status, "Routable")["message"] == "the gateway is ready and serves small"
    assert condition(status, "Degraded") == ("True", "ModelNameTaken")
    assert find(status, "Degraded")["message"] == (
        "behind the gateway 'llama-8b' belongs to service models/older, which was created first: choose another name "
        "or alias, or rename that one's"
    )
    assert status["phase"] == "Degraded"


@pytest.mark.parametrize("pods", [ENGINES, LOADING])
@pytest.mark.parametrize("is_ready", [True, False])
def test_without_a_name_of_its_own_it_is_refused_whatever_else_it_lacks(pods: list[KubeObject], is_ready: bool) -> None:
    status = status_behind(GatewayState(is_ready, NAMES, ALL_TAKEN), pods)
    for name in ("Ready", "Routable"):
        assert condition(status, name) == ("False", "ModelNameTaken")
        assert "'small' belongs to service models/older" in find(status, name)["message"]


def test_a_refused_service_at_zero_would_be_woken_by_nobody() -> None:
    status = status_behind(GatewayState(True, NAMES, ALL_TAKEN), [], num_engines=0)
    assert condition(status, "Ready") == ("False", "ModelNameTaken")


def test_a_taken_alias_is_not_why_engines_that_load_are_not_ready() -> None:
    assert condition(status_behind(replace(READY, taken=TAKEN), LOADING), "Ready") == ("False", "LoadingModel")


def test_a_router_of_its_own_serves_until_the_gateway_does() -> None:
    away = situation(GatewayState(is_ready=False, names=NAMES))
    own = [pod("r1", "router"), pod("r2", "router")]
    status = derived([deployment(), deployment("router")], [*ENGINES, *own], away)
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Routable") == ("True", "RouterReady")
