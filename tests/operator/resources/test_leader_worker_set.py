"""A replica of several pods as a LeaderWorkerSet: like a StatefulSet's, but for who makes the pods."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.labels import group_name, leader_worker_set_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.kube.kinds import LEADER_WORKER_SET, STATEFUL_SET, Kind
from kvasir_operator.resources.engine_group import engine_group
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()
REVISION = "aaaaaaaaaa"
ADDRESS = "--master-addr"


@pytest.fixture
def staged(make_service: MakeService) -> InferenceService:
    return make_service(parallelism={"pipeline": 4, "tensor": 2})


def render(kind: Kind, service: InferenceService, *avoided: str) -> dict[str, Any]:
    role = engine_roles(service, SETTINGS.defaults)[0]
    return engine_group(service, role, REVISION, WantedGroup(0, avoided, kind), SETTINGS)


def command_of(template: dict[str, Any]) -> list[str]:
    [container] = template["spec"]["containers"]
    return list(container["command"])


def test_it_is_one_group_that_nobody_but_the_operator_restarts(staged: InferenceService) -> None:
    spec = render(LEADER_WORKER_SET, staged)["spec"]

    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 4)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["startupPolicy"] == "LeaderCreated"


def test_tensor_ranks_beyond_the_devices_of_a_pod_are_pods_of_the_group(make_service: MakeService) -> None:
    service = make_service(parallelism={"tensor": 4, "pipeline": 2}, resources={"maxDevices": 2})

    assert render(LEADER_WORKER_SET, service)["spec"]["leaderWorkerTemplate"]["size"] == 4


def test_its_pods_are_those_of_a_stateful_set_but_for_the_name_of_their_leader(staged: InferenceService) -> None:
    theirs = render(STATEFUL_SET, staged, "n1")["spec"]["template"]
    ours = render(LEADER_WORKER_SET, staged, "n1")["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    address = dict(pairwise(command_of(ours)))[ADDRESS]

    assert address == "$(LWS_LEADER_ADDRESS)"
    assert dict(pairwise(command_of(theirs)))[ADDRESS] != address
    theirs["spec"]["containers"][0]["command"][command_of(theirs).index(ADDRESS) + 1] = address
    assert ours == theirs


def test_its_name_is_the_groups_and_leaves_room_for_what_is_added(make_service: MakeService) -> None:
    service = make_service(name="l" * 63, parallelism={"pipeline": 2})
    found = render(LEADER_WORKER_SET, service)
    labels = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]

    assert labels["serving.kvasir.dev/group"] == found["metadata"]["name"]
    assert len(found["metadata"]["name"]) <= 63 - len("-0") - len("-0123456789")


@pytest.mark.parametrize(("name_of", "most"), [(group_name, 52), (leader_worker_set_name, 50)])
def test_a_name_is_cut_only_where_what_is_made_of_it_would_be_too_long(name_of: Callable[..., str], most: int) -> None:
    parts = ("serve", REVISION, 0)
    fits = "a" * (most - len(f"-serve-{REVISION}-0"))
    assert name_of(fits, *parts) == f"{fits}-serve-{REVISION}-0"
    assert len(name_of(f"{fits}a", *parts)) == most


def test_kueue_finds_its_queue_on_the_set(make_service: MakeService) -> None:
    queued = make_service(parallelism={"pipeline": 4}, pod={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}})
    rendered = render(LEADER_WORKER_SET, queued)
    template = rendered["spec"]["leaderWorkerTemplate"]["workerTemplate"]

    assert rendered["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "kueue.x-k8s.io/pod-group-name" not in template["metadata"]["labels"]
