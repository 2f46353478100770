"""The status as it is stored: counts, phase, and what the scale subresource reads."""

from dataclasses import replace
from typing import Any, get_args

import pytest
from tests.operator.cluster_objects import (
    NOW,
    deployment,
    member,
    pod,
    service,
    stateful_set,
    waiting_container,
)
from tests.operator.status.service_under_test import SETTLED, URL, KubeObject, status_of

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.fields import manifest_fields
from kvasir_operator.api.parse import parse_group
from kvasir_operator.api.service_status import Phase, ServiceStatus
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.status.conditions import Situation
from kvasir_operator.status.status import derive_status

ENGINES = [pod("e1"), pod("e2")]
ROUTERS = [pod("r1", "router"), pod("r2", "router")]
STUCK = pod("e", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
SUSPENDED = replace(SETTLED, is_suspended=True)
PAUSED = replace(SETTLED, rollout=RolloutPlan(RolloutPhase.PAUSED, "bbbb", 10))


def test_a_service_shows_its_staffing_and_what_scale_needs() -> None:
    status = status_of([deployment()], ENGINES + ROUTERS)
    assert {key: status[key] for key in status if key not in ("roles", "conditions")} == {
        "observedGeneration": 3,
        "phase": "Ready",
        "url": URL,
        "ready": "2/2",
        "replicas": 2,
        "selector": "serving.kvasir.dev/service=llama,serving.kvasir.dev/role=serve",
    }


def test_of_a_disaggregated_service_both_roles_are_counted_and_selected() -> None:
    pods = [pod("p", "prefill"), pod("d", "decode"), *ROUTERS]
    status = status_of([deployment("prefill", 1), deployment("decode", 2)], pods)
    assert (status["ready"], status["replicas"]) == ("2/3", 3)
    assert status["selector"] == "serving.kvasir.dev/service=llama,serving.kvasir.dev/role in (prefill,decode)"


def test_roles_are_listed_engine_first_with_counts_and_revision() -> None:
    status = status_of([deployment(revision="5f0c1e2d3a")], [*ENGINES, pod("old", leaving=True), *ROUTERS])
    assert [each["role"] for each in status["roles"]] == ["serve", "router"]
    expected = {"role": "serve", "desired": 2, "ready": 2, "draining": 1, "message": "", "revision": "5f0c1e2d3a"}
    assert status["roles"][0] == expected


PHASES: dict[Phase, tuple[KubeObject, list[KubeObject], Situation]] = {
    "Pending": (deployment(), [], SETTLED),
    "Loading": (deployment(), [pod("e1", ready=False)], SETTLED),
    "Ready": (deployment(), ENGINES, SETTLED),
    "Scaling": (deployment(), [pod("e1"), pod("e2", ready=False)], SETTLED),
    "Updating": (deployment(total=3, updated=1), [*ENGINES, pod("n", ready=False)], SETTLED),
    "Degraded": (deployment(total=3, updated=1), [*ENGINES, STUCK], SETTLED),
    "Idle": (deployment(replicas=0), [], SETTLED),
    "Suspended": (deployment(replicas=0, total=1), [pod("e1", leaving=True)], SUSPENDED),
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_follows_from_the_conditions(phase: Phase) -> None:
    engine, pods, situation = PHASES[phase]
    assert status_of([engine], pods + ROUTERS, situation)["phase"] == phase


def test_each_phase_is_shown_by_some_service() -> None:
    assert set(PHASES) == set(get_args(Phase))


def test_a_paused_canary_is_an_update_on_its_way() -> None:
    assert status_of([deployment()], ENGINES + ROUTERS, PAUSED)["phase"] == "Updating"


def test_without_any_role_the_problem_is_the_reason_for_everything() -> None:
    situation = Situation("llama", [Waiting(Reason.INVALID_SPEC, "spec.model: required")])
    status = derive_status(service(), [], situation, None, NOW)
    assert [each["reason"] for each in status["conditions"][:3]] == ["InvalidSpec"] * 3
    assert status["replicas"] == 0
    assert not {"selector", "url", "ready"} & status.keys()


def test_what_is_stored_has_the_shape_of_the_schema() -> None:
    status: dict[str, Any] = status_of([deployment()], ENGINES + ROUTERS)
    stored = parse_group(ServiceStatus, status, "status")
    assert stored.roles[0].desired == 2
    assert status.keys() <= {f.key for f in manifest_fields(ServiceStatus)}


def test_of_groups_the_first_pods_are_what_a_scale_counts() -> None:
    group = stateful_set()
    status = status_of([group], [member(0, group), member(1, group), pod("r", "router")])
    assert status["replicas"] == 1
    assert status["selector"] == (
        "serving.kvasir.dev/service=llama,serving.kvasir.dev/role=serve,apps.kubernetes.io/pod-index=0"
    )
