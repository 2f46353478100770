"""The conditions that a service shows, given its Deployments, its pods and what the pass knows besides."""

from dataclasses import replace

import pytest
from tests.operator.cluster_objects import deployment, pod, waiting_container
from tests.operator.status.service_under_test import SETTLED, condition, find, of_revision, status_of

from kvasir_operator.api.conditions import Reason
from kvasir_operator.autoscaling.ledger import ServiceScaling
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.status.conditions import Situation

ENGINES = [pod("e1"), pod("e2")]
ROUTERS = [pod("r1", "router"), pod("r2", "router")]
LOADING = pod("e9", ready=False)
STUCK = pod("stuck", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
UNSUPPORTED = Waiting(Reason.UNSUPPORTED_FEATURE, "spec.autoscaling: later")


def test_a_service_whose_pods_are_all_ready_serves_and_has_come_to_rest() -> None:
    status = status_of([deployment()], ENGINES + ROUTERS)
    assert [(each["type"], each["status"], each["reason"]) for each in status["conditions"]] == [
        ("Ready", "True", "Serving"),
        ("ModelLoaded", "True", "ModelLoaded"),
        ("Routable", "True", "RouterReady"),
        ("Progressing", "False", "RolloutComplete"),
        ("Degraded", "False", "AsExpected"),
    ]
    assert find(status, "Ready")["message"] == "2 of 2 replicas serve llama-8b"


def test_a_partly_staffed_service_is_ready_because_it_serves_and_still_progresses() -> None:
    status = status_of([deployment()], [pod("e1"), LOADING, *ROUTERS])
    assert condition(status, "Ready") == ("True", "Serving")
    assert find(status, "Ready")["message"] == "1 of 2 replicas serve llama-8b"
    assert condition(status, "Progressing") == ("True", "Scaling")
    assert find(status, "Progressing")["message"] == "serve: 1 of 2 ready"


def test_at_zero_a_service_is_ready_because_a_request_wakes_it() -> None:
    status = status_of([deployment(replicas=0)], ROUTERS, replace(SETTLED, scaling=ServiceScaling()))
    assert [condition(status, name) for name in ("Ready", "ModelLoaded", "Routable", "Progressing")] == [
        ("True", "Idle"),
        ("False", "Idle"),
        ("False", "Idle"),
        ("False", "RolloutComplete"),
    ]


def test_at_zero_a_service_that_nothing_scales_is_not_ready() -> None:
    status = status_of([deployment(replicas=0)], ROUTERS)
    assert condition(status, "Ready") == ("False", "Idle")
    assert "would wake nothing" in find(status, "Ready")["message"]


def test_where_no_router_is_wanted_the_manifest_is_named() -> None:
    status = status_of([deployment(replicas=1)], ENGINES[:1], router=deployment("router", replicas=0))
    assert condition(status, "Ready") == ("False", "Idle")
    assert find(status, "Ready")["message"] == "the manifest wants no replicas of router"


def test_at_zero_without_a_router_nothing_would_take_the_request() -> None:
    starting = pod("r", "router", ready=False)
    assert condition(status_of([deployment(replicas=0)], [starting]), "Ready") == ("False", "StartingRouter")


def test_at_zero_with_a_spec_that_does_not_hold_nothing_would_wake() -> None:
    situation = Situation("llama", [Waiting(Reason.INVALID_SPEC, "spec.model: required")])
    assert condition(status_of([deployment(replicas=0)], ROUTERS, situation), "Ready") == ("False", "InvalidSpec")


def test_at_zero_with_a_spec_of_which_no_engine_may_start_nothing_would_wake() -> None:
    status = status_of([deployment(replicas=0)], ROUTERS, replace(SETTLED, blocked="x"))
    assert {name: condition(status, name) for name in ("Ready", "ModelLoaded", "Progressing")} == dict.fromkeys(
        ("Ready", "ModelLoaded", "Progressing"), ("False", "UnsupportedFeature")
    )
    assert condition(status, "Routable") == ("False", "NoReadyEngine")


def test_a_suspended_service_is_not_ready_and_says_why() -> None:
    situation = replace(SETTLED, is_suspended=True)
    status = status_of([deployment(replicas=0)], [], situation, router=deployment("router", 0))
    assert {each["type"]: each["reason"] for each in status["conditions"]} == {
        "Ready": "Suspended",
        "ModelLoaded": "Suspended",
        "Routable": "Suspended",
        "Progressing": "Suspended",
        "Degraded": "AsExpected",
    }
    assert [each["status"] for each in status["conditions"]] == ["False"] * 5


def test_a_suspended_service_whose_last_pods_finish_is_still_progressing() -> None:
    situation = replace(SETTLED, is_suspended=True)
    status = status_of([deployment(replicas=0, total=1)], [], situation, router=deployment("router", 0))
    assert condition(status, "Progressing")[0] == "True"


def test_nothing_is_served_before_a_router_and_an_engine_are_ready() -> None:
    no_engine = status_of([deployment()], [LOADING, *ROUTERS])
    assert condition(no_engine, "Routable") == ("False", "NoReadyEngine")
    assert condition(no_engine, "Ready") == ("False", "LoadingModel")
    no_router = status_of([deployment()], [*ENGINES, pod("r", "router", ready=False)])
    assert condition(no_router, "Routable") == ("False", "StartingRouter")
    assert condition(no_router, "ModelLoaded") == ("True", "ModelLoaded")
    assert condition(no_router, "Ready") == ("False", "StartingRouter")


def test_what_a_spare_engine_lacks_is_not_why_a_service_without_router_is_not_ready() -> None:
    status = status_of([deployment()], [pod("e1"), STUCK, pod("r", "router", ready=False)])
    assert condition(status, "Ready") == ("False", "StartingRouter")
    assert condition(status, "Degraded") == ("True", "ImagePullFailed")


def test_a_split_service_serves_by_its_decode_pods() -> None:
    split = [deployment("prefill", 1), deployment("decode", 1)]
    prefill, decode = pod("p", "prefill"), pod("d", "decode")
    both, alone = status_of(split, [prefill, decode, *ROUTERS]), status_of(split, [decode, *ROUTERS])
    assert [condition(status, "Ready") for status in (both, alone)] == [("True", "Serving"), ("True", "Serving")]
    assert condition(status_of(split, [prefill, *ROUTERS]), "Ready") == ("False", "WaitingForPods")


def test_without_prefill_a_split_service_is_degraded() -> None:
    split = [deployment("prefill", 1), deployment("decode", 1)]
    prefill, decode = pod("p", "prefill"), pod("d", "decode")
    loading = pod("p", "prefill", ready=False)
    assert condition(status_of(split, [prefill, decode, *ROUTERS]), "Degraded") == ("False", "AsExpected")
    assert condition(status_of(split, [loading, decode, *ROUTERS]), "Degraded") == ("True", "NoReadyPrefill")
    assert condition(status_of(split, [loading, *ROUTERS]), "Degraded") == ("False", "AsExpected")


def test_what_prefill_lacks_is_not_why_decode_is_not_ready() -> None:
    split = [deployment("prefill", 1), deployment("decode", 1)]
    stuck = pod("p", "prefill", ready=False, containerStatuses=[waiting_container("ErrImagePull", "no such image")])
    status = status_of(split, [stuck, pod("d", "decode", ready=False), *ROUTERS])
    assert condition(status, "Ready") == ("False", "LoadingModel")


def test_a_service_that_is_being_split_is_served_by_its_former_pods() -> None:
    engines = [deployment("prefill", 1), deployment("decode", 1), deployment("serve", 1)]
    assert condition(status_of(engines, [pod("e"), *ROUTERS]), "Ready") == ("True", "Serving")
    assert condition(status_of(engines, [pod("p", "prefill"), *ROUTERS]), "Ready")[0] == "False"


def test_a_role_that_is_wanted_at_zero_is_not_waited_for() -> None:
    split = [deployment("prefill", 0), deployment("decode", 1)]
    status = status_of(split, [pod("d", "decode"), *ROUTERS])
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Degraded") == ("False", "AsExpected")


def test_pods_of_the_former_revision_serve_while_those_of_the_new_one_start() -> None:
    pods = [of_revision(pod("e1"), "aaaa"), of_revision(pod("n", ready=False), "bbbb"), *ROUTERS]
    status = status_of([deployment(replicas=1, revision="bbbb"), deployment(replicas=1, revision="aaaa")], pods)
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Progressing") == ("True", "RolloutInProgress")
    assert find(status, "Progressing")["message"] == (
        "serve: 1 of 2 ready; pod n: the engine is loading the model; pods of former revisions left: 1 serve"
    )


def test_a_paused_canary_says_what_share_it_has_and_what_it_waits_for() -> None:
    rollout = RolloutPlan(RolloutPhase.PAUSED, "bbbb", traffic_weight=10)
    status = status_of([deployment()], ENGINES + ROUTERS, replace(SETTLED, rollout=rollout))
    assert condition(status, "Progressing") == ("False", "RolloutPaused")
    assert find(status, "Progressing")["message"] == (
        "revision bbbb gets 10 % of the requests until rollout.canary.pause is false"
    )
    assert condition(status, "Degraded") == ("False", "AsExpected")


def test_a_halted_rollout_degrades_a_service_that_serves_on() -> None:
    rollout = RolloutPlan(RolloutPhase.HALTED, "bbbb", trouble="no pod became ready within 600 s")
    status = status_of([deployment()], ENGINES + ROUTERS, replace(SETTLED, rollout=rollout))
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Progressing") == ("False", "RolloutHalted")
    assert condition(status, "Degraded") == ("True", "RolloutHalted")
    assert "no pod became ready within 600 s" in find(status, "Degraded")["message"]


def test_of_a_halted_rollout_the_failure_itself_is_the_reason() -> None:
    rollout = RolloutPlan(RolloutPhase.HALTED, "bbbb", trouble="pod stuck: ErrImagePull")
    situation = replace(SETTLED, rollout=rollout)
    status = status_of([deployment(total=3, updated=1)], [*ENGINES, STUCK, *ROUTERS], situation)
    assert condition(status, "Degraded") == ("True", "ImagePullFailed")
    assert find(status, "Degraded")["message"].count("no such image") == 1


def test_a_feature_that_blocks_engines_is_why_nothing_is_served() -> None:
    problem = Waiting(Reason.UNSUPPORTED_FEATURE, "spec.model.source: no loader for hf://")
    situation = replace(SETTLED, problems=[problem, UNSUPPORTED], blocked=problem.message)
    status = status_of([deployment(total=0)], ROUTERS, situation)
    assert condition(status, "Ready") == ("False", "UnsupportedFeature")
    assert find(status, "Ready")["message"] == problem.message
    assert condition(status, "ModelLoaded") == ("False", "UnsupportedFeature")
    assert condition(status, "Progressing") == ("False", "UnsupportedFeature")
    assert condition(status, "Degraded") == ("True", "UnsupportedFeature")


def test_a_feature_that_blocks_engines_lets_those_of_a_former_revision_serve_on() -> None:
    problem = Waiting(Reason.UNSUPPORTED_FEATURE, "spec.parallelism.tensor: later")
    rollout = RolloutPlan(RolloutPhase.HALTED, "bbbb", trouble=problem.message)
    situation = Situation("llama-8b", [problem], rollout, blocked=problem.message)
    status = status_of([deployment()], ENGINES + ROUTERS, situation)
    assert condition(status, "Ready") == ("True", "Serving")
    assert condition(status, "Progressing") == ("False", "RolloutHalted")
    assert condition(status, "Degraded") == ("True", "UnsupportedFeature")


def test_a_feature_that_blocks_engines_is_not_why_a_router_is_missing() -> None:
    situation = replace(SETTLED, blocked="spec.model.source: no loader for hf://")
    status = status_of([deployment()], [*ENGINES, pod("r", "router", ready=False)], situation)
    assert condition(status, "Ready") == ("False", "StartingRouter")


def test_an_unsupported_feature_that_blocks_nothing_does_not_hide_why_pods_wait() -> None:
    problems = [UNSUPPORTED, Waiting(Reason.UNSUPPORTED_FEATURE, "spec.engine.adapters: later")]
    status = status_of([deployment()], [LOADING, *ROUTERS], replace(SETTLED, problems=problems))
    assert condition(status, "Degraded") == ("True", "UnsupportedFeature")
    assert find(status, "Degraded")["message"] == "spec.autoscaling: later; spec.engine.adapters: later"
    assert condition(status, "Ready") == ("False", "LoadingModel")


def test_the_worst_of_several_problems_gives_the_reason_and_all_are_reported() -> None:
    problems = [UNSUPPORTED, Waiting(Reason.QUOTA_EXCEEDED, "bad")]
    status = status_of([deployment()], ENGINES + ROUTERS, replace(SETTLED, problems=problems))
    assert condition(status, "Degraded") == ("True", "QuotaExceeded")
    assert find(status, "Degraded")["message"] == "bad; spec.autoscaling: later"


@pytest.mark.parametrize("missing", ["engine", "router"])
def test_a_refused_deployment_counts_as_a_role_without_pods(missing: str) -> None:
    engine, router = deployment(), deployment("router")
    refused = engine if missing == "engine" else router
    del refused["status"]
    pods = ROUTERS if missing == "engine" else ENGINES
    situation = replace(SETTLED, problems=[Waiting(Reason.APPLY_FAILED, "Deployment llama: no")])
    status = status_of([engine], pods, situation, router=router)
    assert condition(status, "Ready") == ("False", "ApplyFailed")


def test_a_deployment_that_its_controller_has_not_seen_yet_is_still_progressing() -> None:
    engine = deployment()
    engine["metadata"]["generation"] = 2
    assert condition(status_of([engine], ENGINES + ROUTERS), "Progressing") == ("True", "Scaling")
