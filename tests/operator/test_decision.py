"""What a pass decides for replicas of several pods: which go, which are restarted, and where they may run then."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.api.labels import GROUP_LABEL, REVISION_LABEL, ROLE_LABEL, SERVICE_LABEL, group_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.apply.plan import stamped
from kvasir_operator.decision import Decision, decide, plot_course
from kvasir_operator.desired.objects import CurrentRevision, DesiredService, desired_service
from kvasir_operator.groups.choice import WantedGroup
from kvasir_operator.groups.record import RESTARTS, RestartRecord
from kvasir_operator.kube.kinds import STATEFUL_SET, KubeObject, ObjectKey
from kvasir_operator.observe.observe import Observed
from kvasir_operator.settings import OperatorSettings

from .cluster_objects import NOW, member, service, stored

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


@pytest.fixture
def wanted(make_service: MakeService) -> DesiredService:
    """Two groups of two pods."""
    return desired_service(make_service(uid="uid-1", replicas=2, parallelism={"pipeline": 2}), SETTINGS)


def live(wanted: DesiredService, *indexes: int) -> tuple[KubeObject, ...]:
    """All children with these groups, as a pass has applied them."""
    groups = {"serve": [WantedGroup(index) for index in indexes]}
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
    course = plot_course(wanted, observed, "uid-1", now)
    return decide(wanted, observed, service(), course, None, now, work or {})


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
    first = next(each for each in children if each["kind"] == "StatefulSet")
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
