"""The status that a service shows, given its Deployments, its pods and the problems of a pass."""

from typing import Any

import pytest

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import REVISION_LABEL
from kvasir_operator.status import derive_status, role_state, status_patch
from kvasir_operator.waiting import Waiting

from .cluster_objects import NOW, deployment, pod, pod_event, service, waiting_container

URL = "http://llama-router.models.svc:8080/v1"
ENGINES = [pod("e1"), pod("e2")]
ROLLING = deployment(total=3, updated=1)
ROUTERS = [pod("r1", "router"), pod("r2", "router")]


def status_of(
    engine: dict[str, Any],
    pods: list[dict[str, Any]],
    router: dict[str, Any] | None = None,
    problems: tuple[Waiting, ...] = (),
    previous: dict[str, Any] | None = None,
) -> dict[str, Any]:
    roles = [role_state(each, pods) for each in (router or deployment("router"), engine)]
    return derive_status(service(status=previous), roles, problems, "llama-8b", URL, NOW)


def condition(status: dict[str, Any], name: str) -> tuple[str, str]:
    (found,) = (each for each in status["conditions"] if each["type"] == name)
    return found["status"], found["reason"]


def test_a_service_whose_pods_are_all_ready_is_ready() -> None:
    status = status_of(deployment(), ENGINES + ROUTERS)
    assert {key: status[key] for key in ("phase", "url", "replicas", "selector", "observedGeneration")} == {
        "phase": "Ready",
        "url": URL,
        "replicas": 2,
        "selector": "serving.kvasir.dev/service=llama,serving.kvasir.dev/role=serve",
        "observedGeneration": 3,
    }
    assert [(each["type"], each["status"], each["reason"]) for each in status["conditions"]] == [
        ("Ready", "True", "AllRolesReady"),
        ("ModelLoaded", "True", "ModelLoaded"),
        ("Routable", "True", "RouterReady"),
        ("Progressing", "False", "RolloutComplete"),
        ("Degraded", "False", "AsExpected"),
    ]
    assert status["conditions"][0]["message"] == "2 of 2 replicas serve llama-8b"


def test_roles_are_told_engine_first_with_counts_and_revision() -> None:
    leaving = pod("old", leaving=True)
    status = status_of(deployment(revision="5f0c1e2d3a"), [*ENGINES, leaving, *ROUTERS])
    assert [each["role"] for each in status["roles"]] == ["serve", "router"]
    expected = {"role": "serve", "desired": 2, "ready": 2, "draining": 1, "message": "", "revision": "5f0c1e2d3a"}
    assert status["roles"][0] == expected


@pytest.mark.parametrize(
    ("engine", "pods", "phase", "ready", "progressing"),
    [
        (deployment(), [], "Pending", "WaitingForPods", "Starting"),
        (deployment(), [pod("e1", ready=False)], "Loading", "LoadingModel", "Starting"),
        (deployment(), [pod("e1"), pod("e2", ready=False)], "Scaling", "LoadingModel", "Scaling"),
        (ROLLING, [*ENGINES, pod("n", ready=False)], "Updating", "AllRolesReady", "RolloutInProgress"),
        (deployment(replicas=0), [], "Idle", "ScaledToZero", "RolloutComplete"),
    ],
)  # fmt: skip
def test_the_phase_follows_from_the_conditions(
    engine: dict[str, Any], pods: list[dict[str, Any]], phase: str, ready: str, progressing: str
) -> None:
    status = status_of(engine, pods + ROUTERS)
    seen = (status["phase"], condition(status, "Ready")[1], condition(status, "Progressing")[1])
    assert seen == (phase, ready, progressing)


def test_a_deployment_that_its_controller_has_not_seen_yet_is_still_progressing() -> None:
    engine = deployment()
    engine["metadata"]["generation"] = 2
    assert condition(status_of(engine, ENGINES + ROUTERS), "Progressing") == ("True", "Scaling")


def test_requests_reach_nothing_before_a_router_and_an_engine_are_ready() -> None:
    assert condition(status_of(deployment(), ROUTERS), "Routable") == ("False", "NoReadyEngine")
    no_router = status_of(deployment(), [*ENGINES, pod("r", "router", ready=False)])
    assert condition(no_router, "Routable") == ("False", "StartingRouter")
    assert condition(no_router, "ModelLoaded") == ("True", "ModelLoaded")


def test_a_failing_rollout_degrades_a_service_that_still_serves() -> None:
    stuck = pod("new", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
    status = status_of(deployment(total=3, updated=1), [*ENGINES, stuck, *ROUTERS])
    assert condition(status, "Ready")[0] == "True"
    assert condition(status, "Degraded") == ("True", "ImagePullFailed")
    assert status["phase"] == "Degraded"
    assert "no such image" in status["roles"][0]["message"]


def test_what_an_earlier_revisions_pod_lacked_is_over_once_it_has_a_successor() -> None:
    stuck = pod("old", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
    stuck["metadata"]["labels"][REVISION_LABEL] = "aaaa"
    successor = pod("new", ready=False)
    successor["metadata"]["labels"][REVISION_LABEL] = "bbbb"
    mended = deployment(replicas=1, total=2, updated=1, revision="bbbb")
    assert condition(status_of(mended, [stuck, *ROUTERS]), "Degraded") == ("True", "ImagePullFailed")
    assert condition(status_of(mended, [stuck, successor, *ROUTERS]), "Degraded") == ("False", "AsExpected")


def test_events_of_a_pod_reach_the_condition() -> None:
    creating = pod("e", ready=False, containerStatuses=[waiting_container("ContainerCreating")])
    events = {"e": [pod_event("FailedMount", 'secret "keys" not found')]}
    state = role_state(deployment(), [creating], events)
    assert state.waiting is not None
    assert state.waiting.reason is Reason.SECRET_NOT_FOUND


def test_every_unsupported_feature_is_listed_and_does_not_hide_why_pods_wait() -> None:
    problems = (
        Waiting(Reason.UNSUPPORTED_FEATURE, "spec.autoscaling: later"),
        Waiting(Reason.UNSUPPORTED_FEATURE, "spec.disaggregation: later"),
    )
    status = status_of(deployment(), [pod("e", ready=False), *ROUTERS], problems=problems)
    assert condition(status, "Degraded") == ("True", "UnsupportedFeature")
    assert status["conditions"][4]["message"] == "spec.autoscaling: later; spec.disaggregation: later"
    assert condition(status, "Ready") == ("False", "LoadingModel")


def test_the_worst_of_several_problems_gives_the_reason_and_all_are_told() -> None:
    problems = (Waiting(Reason.UNSUPPORTED_FEATURE, "mild"), Waiting(Reason.QUOTA_EXCEEDED, "bad"))
    status = status_of(deployment(), ENGINES + ROUTERS, problems=problems)
    assert condition(status, "Degraded") == ("True", "QuotaExceeded")
    assert status["conditions"][4]["message"] == "bad; mild"


def test_a_refused_deployment_counts_as_a_role_without_pods() -> None:
    refused = deployment()
    del refused["status"]
    problems = (Waiting(Reason.APPLY_FAILED, "Deployment llama-serve: no"),)
    status = status_of(refused, ROUTERS, problems=problems)
    assert status["roles"][0]["desired"] == 2
    assert condition(status, "Ready") == ("False", "ApplyFailed")


def test_without_any_role_the_problem_is_the_reason_for_everything() -> None:
    problem = Waiting(Reason.INVALID_SPEC, "spec.model: required")
    status = derive_status(service(), [], [problem], "llama", None, NOW)
    assert [each["reason"] for each in status["conditions"][:3]] == ["InvalidSpec"] * 3
    assert (status["replicas"], status["selector"], status["url"]) == (0, None, None)


def test_an_unchanged_status_is_not_written_again() -> None:
    first = status_of(deployment(), ENGINES + ROUTERS)
    later = status_of(deployment(), ENGINES + ROUTERS, previous=first)
    assert status_patch(first, later) == {}


def test_only_what_changed_is_written_and_an_absent_field_is_no_change() -> None:
    assert status_patch({"phase": "Ready", "scaling": []}, {"phase": "Idle", "url": None}) == {"phase": "Idle"}
    assert status_patch({"url": URL}, {"url": None}) == {"url": None}
