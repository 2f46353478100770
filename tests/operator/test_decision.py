"""What a pass decides for replicas of several pods: which go, which are restarted, and where they may run then."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvasir_operator.api.labels import (
    GROUP_LABEL,
    LEADER_WORKER_SET_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    group_name,
)
from kvasir_operator.api.model import InferenceService
from kvasir_operator.apply.plan import stamped
from kvasir_operator.decision import Decision, decide, next_step
from kvasir_operator.desired.objects import CurrentRevision, DesiredService, desired_service
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.groups.restart import RESTARTED_AT
from kvasir_operator.kube.kinds import (
    GROUP_KINDS,
    LEADER_WORKER_SET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
    KubeObject,
    ObjectKey,
    object_key,
)
from kvasir_operator.observe.observe import Observed
from kvasir_operator.rollout.observed import observe_workloads
from kvasir_operator.settings import OperatorSettings

from .cluster_objects import NOW, member, service, stored

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


@pytest.fixture
def wanted(make_service: MakeService) -> DesiredService:
    """Two groups of two pods."""
    return desired_service(make_service(uid="uid-1", replicas=2, parallelism={"pipeline": 2}), SETTINGS)


@pytest.fixture
def led(wanted: DesiredService) -> DesiredService:
    """The same where the cluster has LeaderWorkerSets."""
    return replace(wanted, group_kind=LEADER_WORKER_SET)


def live(wanted: DesiredService, *indexes: int) -> tuple[KubeObject, ...]:
    """All children with these groups, as a pass has applied them."""
    groups = {"serve": [WantedGroup(index, kind=wanted.group_kind) for index in indexes]}
    objects = wanted.objects(CurrentRevision(wanted.revision, 1, {"serve": len(indexes)}, groups=groups))
    return tuple(stored(stamped(each), uid=f"uid-{each['metadata']['name']}") for each in objects)


def pods_of(wanted: DesiredService, *indexes: int, **fields: Any) -> list[KubeObject]:
    found = []
    for index in indexes:
        name = group_name("llama", "serve", wanted.revision, index)
        labels = {SERVICE_LABEL: "llama", ROLE_LABEL: "serve", REVISION_LABEL: wanted.revision, GROUP_LABEL: name}
        found += [member(rank, {"metadata": {"name": name, "labels": labels}}, **fields) for rank in (0, 1)]
    return found


def decision(
    wanted: DesiredService,
    children: tuple[KubeObject, ...],
    pods: list[KubeObject],
    work: dict[str, int] | None = None,
    now: str = NOW,
) -> Decision:
    observed = Observed(children, tuple(pods))
    step = next_step(wanted, observed, observe_workloads(observed, "uid-1", now))
    return decide(wanted, observed, service(), step, None, now, work or {})


def indexes(keys: list[ObjectKey]) -> list[str]:
    return [key.name.rpartition("-")[2] for key in keys if key.kind == STATEFUL_SET]


def test_at_rest_nothing_is_planned(wanted: DesiredService) -> None:
    found = decision(wanted, live(wanted, 0, 1), pods_of(wanted, 0, 1))
    assert (found.plan.applies, found.plan.deletes, found.plan.restarts) == ((), (), ())
    assert found.retry_seconds is None


def test_the_first_groups_are_made_where_there_is_none(wanted: DesiredService) -> None:
    assert indexes([action.key for action in decision(wanted, (), []).plan.applies]) == ["0", "1"]


def test_groups_whose_pods_are_still_leaving_keep_their_names(wanted: DesiredService) -> None:
    gone = [each for each in live(wanted) if each["kind"] != "StatefulSet"]
    found = decision(wanted, tuple(gone), pods_of(wanted, 0, leaving=True))
    assert indexes([action.key for action in found.plan.applies]) == ["1", "2"]


def test_the_group_with_the_least_work_is_deleted_and_the_others_stay_as_they_are(wanted: DesiredService) -> None:
    pods = pods_of(wanted, 0, 1, 2)
    work = {pod["metadata"]["name"]: 5 for pod in pods} | {pods[2]["metadata"]["name"]: 0}
    found = decision(wanted, live(wanted, 0, 1, 2), pods, work)
    assert indexes([each.key for each in found.plan.deletes]) == ["1"]
    assert indexes([each.key for each in found.plan.applies]) == []


def failed(pods: list[KubeObject]) -> list[KubeObject]:
    end = {"exitCode": 1, "reason": "Error", "finishedAt": NOW}
    container = {"name": "engine", "state": {"terminated": end}, "ready": False, "restartCount": 0}
    pods[1]["status"] = {"containerStatuses": [container]}
    return pods


def test_a_failed_group_is_restarted_and_the_other_is_not(wanted: DesiredService) -> None:
    [restart] = decision(wanted, live(wanted, 0, 1), failed(pods_of(wanted, 0, 1))).plan.restarts
    assert (indexes([restart.key]), [pod.name[-3:] for pod in restart.pods]) == (["0"], ["0-0", "0-1"])


def test_a_group_that_goes_is_not_restarted(wanted: DesiredService) -> None:
    pods = failed(pods_of(wanted, 0, 1, 2))
    for pod in pods[:2]:
        pod["status"].setdefault("conditions", [{"type": "Ready", "status": "False"}])[0]["status"] = "False"
    found = decision(wanted, live(wanted, 0, 1, 2), pods)
    assert indexes([each.key for each in found.plan.deletes]) == ["0"]
    assert found.plan.restarts == ()


def with_record(children: tuple[KubeObject, ...], record: RestartRecord) -> tuple[KubeObject, ...]:
    first = next(each for each in children if each["kind"] in ("StatefulSet", "LeaderWorkerSet"))
    first["metadata"]["annotations"] = {**first["metadata"]["annotations"], RESTARTS: record.text()}
    return children


def test_the_template_avoids_a_node_before_the_pods_are_made_anew(wanted: DesiredService) -> None:
    record = RestartRecord(1, "2026-11-20T09:59:00Z", "it failed", {"node-1": 1})
    children = with_record(live(wanted, 0, 1), record)
    found = decision(wanted, children, failed(pods_of(wanted, 0, 1)))
    [action] = found.plan.applies
    assert indexes([action.key]) == ["0"]
    assert "node-1" in json.dumps(action.obj["spec"]["template"]["spec"]["affinity"])
    assert len(found.plan.restarts) == 1


def test_a_restart_that_has_to_wait_is_looked_at_again(wanted: DesiredService) -> None:
    children = with_record(live(wanted, 0, 1), RestartRecord(1, NOW, "it failed", {"node-1": 1}))
    pods = failed(pods_of(wanted, 0, 1))
    pods[0]["status"]["conditions"][0]["status"] = "False"
    found = decision(wanted, children, pods, now="2026-11-20T10:00:04Z")
    assert (found.plan.restarts, found.retry_seconds) == ((), 6)
    assert [problem.reason for problem in found.problems] == ["GroupRestarted"]


def partly_placed(pods: list[KubeObject]) -> list[KubeObject]:
    """Of each of these groups of two the second pod finds no node."""
    for pod in pods:
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        pod["status"] = {"conditions": [unscheduled]} if pod["metadata"]["name"].endswith("-1") else {}
        pod["spec"] = {} if pod["status"] else {"nodeName": "node-0"}
    return pods


@pytest.fixture
def three(make_service: MakeService) -> DesiredService:
    """Three groups of two pods."""
    return desired_service(make_service(uid="uid-1", replicas=3, parallelism={"pipeline": 2}), SETTINGS)


def test_of_groups_that_hold_a_part_of_their_room_each_one_stays(three: DesiredService) -> None:
    pods = [*pods_of(three, 0), *partly_placed(pods_of(three, 1, 2))]
    found = decision(three, live(three, 0, 1, 2), pods).plan
    assert (indexes([each.key for each in found.deletes]), indexes([each.key for each in found.applies])) == (["2"], [])
    [restart] = found.restarts
    assert [(pod.name[-3:], pod.grace_seconds) for pod in restart.pods] == [("2-0", 1), ("2-1", 1)]
    assert restart.annotations == {}


def test_the_group_that_is_nearest_to_being_whole_stays(make_service: MakeService) -> None:
    wanted = desired_service(make_service(uid="uid-1", replicas=2, parallelism={"pipeline": 3}), SETTINGS)
    more = member(2, pods_of(wanted, 1)[0])
    more["metadata"]["name"] = more["metadata"]["name"].replace("-0-2", "-2")
    pods = [*partly_placed(pods_of(wanted, 0, 1)), more]
    assert indexes([each.key for each in decision(wanted, live(wanted, 0, 1), pods).plan.deletes]) == ["0"]


def test_no_group_is_added_before_a_partly_placed_one_is_whole(three: DesiredService) -> None:
    children, whole = live(three, 0, 1), pods_of(three, 0)
    assert groups_made(decision(three, children, [*whole, *partly_placed(pods_of(three, 1))])) == []
    assert groups_made(decision(three, children, [*whole, *pods_of(three, 1)])) == ["StatefulSet"]


def test_no_node_is_blamed_while_a_group_waits_for_its_pods(wanted: DesiredService) -> None:
    pods = failed(pods_of(wanted, 0, 1))
    pods[0]["spec"], pods[0]["status"] = {}, {}
    [restart] = decision(wanted, live(wanted, 0, 1), pods).plan.restarts
    assert json.loads(restart.annotations[RESTARTS])["nodes"] == {}


def asked_to_restart(children: tuple[KubeObject, ...], *indexes: int) -> tuple[KubeObject, ...]:
    """As `kubectl rollout restart statefulset` leaves these groups."""
    for each in children:
        if each["kind"] == "StatefulSet" and int(each["metadata"]["name"].rpartition("-")[2]) in indexes:
            each["spec"]["template"]["metadata"]["annotations"] = {RESTARTED_AT: "2026-11-20T10:00:00Z"}
    return children


def restarted(pods: list[KubeObject]) -> list[KubeObject]:
    for each in pods:
        each["metadata"]["annotations"] = {RESTARTED_AT: "2026-11-20T10:00:00Z"}
    return pods


def test_a_group_is_made_anew_by_rollout_restart_after_its_requests(wanted: DesiredService) -> None:
    [restart] = decision(wanted, asked_to_restart(live(wanted, 0, 1), 1), pods_of(wanted, 0, 1)).plan.restarts
    assert [(pod.name[-3:], pod.grace_seconds) for pod in restart.pods] == [("1-0", None), ("1-1", None)]
    assert restart.annotations == {}


def test_groups_are_made_anew_one_after_the_other(wanted: DesiredService) -> None:
    children = asked_to_restart(live(wanted, 0, 1), 0, 1)

    def next_restarts(pods: list[KubeObject]) -> list[str]:
        return indexes([each.key for each in decision(wanted, children, pods).plan.restarts])

    first, second = pods_of(wanted, 0), pods_of(wanted, 1)
    assert next_restarts([*first, *second]) == ["0"]
    assert next_restarts([*restarted(pods_of(wanted, 0, ready=False)), *second]) == []
    assert next_restarts([*restarted(first), *second]) == ["1"]
    assert next_restarts([*restarted(first), *restarted(second)]) == []
    assert next_restarts([*pods_of(wanted, 0, ready=False), *restarted(pods_of(wanted, 1, ready=False))]) == ["0"]


def groups_made(found: Decision) -> list[str]:
    return [str(action.key.kind.kind) for action in found.plan.applies if action.key.kind in GROUP_KINDS]


def test_the_groups_of_a_new_revision_are_what_the_cluster_offers(led: DesiredService) -> None:
    assert groups_made(decision(led, (), [])) == ["LeaderWorkerSet", "LeaderWorkerSet"]
    assert ObjectKey(LEADER_WORKER_SET, group_name("llama", "serve", led.revision, 1)) in led.keys


def test_groups_that_are_there_stay_what_they_are_and_have_others_like_them(
    wanted: DesiredService, led: DesiredService
) -> None:
    assert wanted.revision == led.revision
    found = decision(led, live(wanted, 0), pods_of(wanted, 0))
    assert (groups_made(found), found.plan.deletes) == (["StatefulSet"], ())
    at_rest = decision(led, live(led, 0, 1), pods_of(led, 0, 1))
    assert (at_rest.plan.applies, at_rest.plan.deletes, at_rest.plan.restarts) == ((), (), ())


def test_of_a_leader_worker_set_a_node_is_avoided_until_the_next_restart_which_may_be_long(
    wanted: DesiredService, led: DesiredService
) -> None:
    record = RestartRecord(2, "2026-11-20T08:00:00Z", "it failed", {"node-1": 2})
    templates = {
        each.group_kind: json.dumps(
            [action.obj for action in decision(each, with_record(live(each, 0, 1), record), []).plan.applies]
        )
        for each in (wanted, led)
    }
    assert "node-1" not in templates[STATEFUL_SET]  # two hours later, and nothing is restarted by it
    assert "node-1" in templates[LEADER_WORKER_SET]


def test_a_group_keeps_its_name_while_its_leader_is_leaving(led: DesiredService) -> None:
    gone = tuple(each for each in live(led) if each["kind"] != "LeaderWorkerSet")
    pods = pods_of(led, 0, leaving=True)
    del pods[1]["metadata"]["deletionTimestamp"]
    made = [action.key for action in decision(led, gone, pods).plan.applies]
    assert [key.name.rpartition("-")[2] for key in made if key.kind == LEADER_WORKER_SET] == ["1", "2"]


@pytest.fixture
def single(make_service: MakeService) -> DesiredService:
    """The service of `wanted` after a change: pods are replicas by themselves, with an account of somebody else's."""
    changed = make_service(uid="uid-1", replicas=2, pod={"serviceAccountName": "theirs"})
    return desired_service(changed, SETTINGS)


@pytest.mark.parametrize("kind", [STATEFUL_SET, LEADER_WORKER_SET], ids=str)
def test_what_groups_of_a_former_revision_need_is_made_again_as_it_was(
    wanted: DesiredService, single: DesiredService, kind: Kind
) -> None:
    former, pods = live(replace(wanted, group_kind=kind), 0, 1), pods_of(wanted, 0, 1)
    names = {f"llama-serve-{wanted.revision}", "llama-engine"} | (
        {"llama-serve-ranks"} if kind == STATEFUL_SET else set()
    )
    kinds = (SERVICE.kind, SERVICE_ACCOUNT.kind)
    needed = {object_key(each): each for each in former if each["kind"] in kinds and each["metadata"]["name"] in names}
    assert len(needed) == len(names)
    left = tuple(each for each in former if object_key(each) not in needed)
    made = {action.key: action.obj for action in decision(single, left, pods).plan.applies}
    assert {key: stored(made[key], uid=f"uid-{key.name}") for key in needed} == needed
    assert not needed.keys() & {each.key for each in decision(single, former, pods).plan.deletes}


def test_a_group_of_a_former_revision_that_was_deleted_is_named_while_it_has_pods(
    wanted: DesiredService, single: DesiredService
) -> None:
    pods = pods_of(wanted, 0, 1)
    [problem] = decision(single, live(wanted, 0), pods).problems
    assert problem.reason == "WorkloadDeleted"
    assert f"{group_name('llama', 'serve', wanted.revision, 1)} of a former revision" in problem.message
    for pod in pods:
        pod["metadata"]["creationTimestamp"] = "2026-11-20T09:59:59Z"  # of a service before this one
    assert decision(single, (), pods).problems == ()


def test_where_leader_worker_sets_were_removed_stateful_sets_take_their_place_and_the_status_says_so(
    wanted: DesiredService,
) -> None:
    pods = pods_of(wanted, 0, 1, leaving=True)
    for pod in pods:
        pod["metadata"]["labels"][LEADER_WORKER_SET_LABEL] = pod["metadata"]["labels"][GROUP_LABEL]
    gone = tuple(each for each in live(wanted) if each["kind"] != "StatefulSet")
    found = decision(wanted, gone, pods)
    assert indexes([action.key for action in found.plan.applies]) == ["2", "3"]
    assert [problem.reason for problem in found.problems] == ["LeaderWorkerSetsRemoved"]
