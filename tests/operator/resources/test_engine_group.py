"""A replica of several pods: its StatefulSet, and how its pods find one another."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.resources.engine_group import engine_group
from kvasir_operator.resources.services import engine_service, rendezvous_service
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()
REVISION = "aaaaaaaaaa"


def render(service: InferenceService, index: int = 0, avoided: tuple[str, ...] = ()) -> dict[str, Any]:
    role = engine_roles(service, SETTINGS.defaults)[0]
    return engine_group(service, role, REVISION, WantedGroup(index, avoided), SETTINGS)


def container_of(group: dict[str, Any]) -> dict[str, Any]:
    [container] = group["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.fixture
def staged(make_service: MakeService) -> InferenceService:
    return make_service(parallelism={"pipeline": 4, "tensor": 2})


def test_its_pods_are_made_at_once_and_made_anew_by_nobody_else(staged: InferenceService) -> None:
    spec = render(staged)["spec"]

    assert (spec["replicas"], spec["podManagementPolicy"], spec["updateStrategy"]) == (
        4,
        "Parallel",
        {"type": "OnDelete"},
    )


def test_each_pod_learns_its_rank_and_where_rank_0_is(staged: InferenceService) -> None:
    container = container_of(render(staged))
    flags = dict(pairwise(container["command"]))
    fields = {each["name"]: each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for each in container["env"]}

    assert (flags["--nnodes"], flags["--node-rank"]) == ("4", "$(KVASIR_NODE_RANK)")
    assert (flags["--master-addr"], flags["--master-port"]) == (
        "$(KVASIR_GROUP)-0.llama-serve-ranks.models.svc",
        "29500",
    )
    assert fields["KVASIR_NODE_RANK"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert fields["KVASIR_GROUP"] == "metadata.labels['serving.kvasir.dev/group']"


def test_its_label_names_it_and_its_pods_and_those_of_no_other_group_are_selected(staged: InferenceService) -> None:
    first, second = render(staged, 0), render(staged, 1)
    labels = first["spec"]["template"]["metadata"]["labels"]

    assert labels["serving.kvasir.dev/group"] == first["metadata"]["name"] == f"llama-serve-{REVISION}-0"
    assert first["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert not second["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_pods_have_names_in_dns_before_they_are_ready(staged: InferenceService) -> None:
    [role] = engine_roles(staged, SETTINGS.defaults)
    service = rendezvous_service(staged, role.name)
    spec, labels = service["spec"], render(staged)["spec"]["template"]["metadata"]["labels"]

    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert service["metadata"]["name"] == render(staged)["spec"]["serviceName"]
    assert spec["selector"].items() <= labels.items()


def test_routers_see_the_first_pod_and_pass_over_the_service_for_the_rendezvous(staged: InferenceService) -> None:
    [role] = engine_roles(staged, SETTINGS.defaults)
    selector = engine_service(staged, role.name, REVISION, None, is_grouped=True)["spec"]["selector"]
    rendezvous = rendezvous_service(staged, role.name)

    assert selector["apps.kubernetes.io/pod-index"] == "0"
    assert rendezvous["metadata"]["labels"]["serving.kvasir.dev/role"] not in ("serve", "prefill", "decode")


def test_a_pod_that_is_a_replica_by_itself_has_nothing_of_this(make_service: MakeService) -> None:
    services = desired_objects(make_service(parallelism={"tensor": 2}), SETTINGS)
    named = {each["metadata"]["name"]: each for each in services if each["kind"] == "Service"}
    [engines] = [each for name, each in named.items() if name.startswith("llama-serve-")]

    assert "apps.kubernetes.io/pod-index" not in engines["spec"]["selector"]


def test_names_leave_room_for_what_kubernetes_adds(make_service: MakeService) -> None:
    service = make_service(name="l" * 63, parallelism={"pipeline": 2})
    names = {render(service, index)["metadata"]["name"] for index in (0, 999)}

    assert len(names) == 2
    assert max(map(len, names)) <= 63 - len("-0123456789")  # a digest in the label controller-revision-hash


def test_groups_are_not_spread_because_that_would_pull_their_stages_apart(staged: InferenceService) -> None:
    assert "topologySpreadConstraints" not in render(staged)["spec"]["template"]["spec"]


def test_nodes_are_avoided_where_others_have_room_beside_what_the_manifest_prefers(make_service: MakeService) -> None:
    own = {"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}
    affinity = {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [own]},
    }
    service = make_service(parallelism={"pipeline": 2}, pod={"affinity": affinity})
    found = render(service, avoided=("n1", "n2"))["spec"]["template"]["spec"]["affinity"]
    [mine, avoiding] = found["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]

    assert (found["podAffinity"], mine) == (affinity["podAffinity"], own)
    assert avoiding == {
        "weight": 100,
        "preference": {
            "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}]
        },
    }
    assert render(service)["spec"]["template"]["spec"]["affinity"] == affinity


def test_tensor_ranks_beyond_the_devices_of_a_pod_are_pods_of_the_group(make_service: MakeService) -> None:
    group = render(make_service(parallelism={"tensor": 16, "pipeline": 2}, resources={"maxDevices": 8}))
    flags = dict(pairwise(container_of(group)["command"]))
    sizes = [flags[f"--{each}"] for each in ("tensor-parallel-size", "pipeline-parallel-size", "nnodes")]

    assert sizes == ["16", "2", "4"]
    assert (group["spec"]["replicas"], group["metadata"]["annotations"]["serving.kvasir.dev/group-size"]) == (4, "4")


RANKS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"tensor": 8}, ["--tensor-parallel-size", "8"]),
    ({"data": 2}, ["--data-parallel-size", "2"]),
    ({"tensor": 2, "expert": True}, ["--tensor-parallel-size", "2", "--enable-expert-parallel"]),
    ({"pipeline": 2}, ["--pipeline-parallel-size", "2", "--nnodes", "2"]),
    ({"pipeline": 2, "data": 2}, ["--pipeline-parallel-size", "2", "--data-parallel-size", "2", "--nnodes", "2"]),
]


@pytest.mark.parametrize(("parallelism", "flags"), RANKS, ids=[str(each) for each, _ in RANKS])
def test_degrees_are_flags_where_there_is_more_than_one_rank(
    make_service: MakeService, parallelism: dict[str, Any], flags: list[str]
) -> None:
    command = container_of(render(make_service(parallelism=parallelism)))["command"]
    named = [each for each in command if "parallel" in each or each == "--nnodes"]

    assert " ".join(flags) in " ".join(command)
    assert named == [flag for flag in flags if flag.startswith("--")]


@pytest.mark.parametrize(("index", "kv_role"), [(0, "kv_producer"), (1, "kv_consumer")])
def test_prefill_and_decode_exchange_kv_of_their_own_revision_alone(
    make_service: MakeService, index: int, kv_role: str
) -> None:
    service = make_service(disaggregation={"prefill": {}, "decode": {}})
    role = engine_roles(service, SETTINGS.defaults)[index]
    container = container_of(engine_group(service, role, REVISION, WantedGroup(0), SETTINGS))
    config = json.loads(dict(pairwise(container["command"]))["--kv-transfer-config"])
    sources = {each["name"]: each["valueFrom"] for each in container["env"] if "fieldRef" in each.get("valueFrom", {})}

    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", kv_role)
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "side_channel_host": "$(POD_IP)",
        "side_channel_port": 5600,
        "revision": "$(KVASIR_REVISION)",
        "checksums": True,
        "lease_seconds": 30,
    }
    assert sources == {
        "POD_IP": {"fieldRef": {"fieldPath": "status.podIP"}},
        "KVASIR_REVISION": {"fieldRef": {"fieldPath": "metadata.labels['serving.kvasir.dev/revision']"}},
    }
    assert 5600 in [port["containerPort"] for port in container["ports"]]


def test_each_data_parallel_rank_has_a_side_channel(make_service: MakeService) -> None:
    service = make_service(disaggregation={"prefill": {"parallelism": {"data": 3}}, "decode": {}})
    prefill, decode = (
        container_of(engine_group(service, role, REVISION, WantedGroup(0), SETTINGS))["ports"]
        for role in engine_roles(service, SETTINGS.defaults)
    )

    assert {port["name"]: port["containerPort"] for port in prefill if port["name"].startswith("kv-transfer")} == {
        "kv-transfer": 5600, "kv-transfer-1": 5601, "kv-transfer-2": 5602,
    }  # fmt: skip
    assert [port["name"] for port in decode if port["name"].startswith("kv-transfer")] == ["kv-transfer"]


def test_a_role_that_does_both_exchanges_kv_both_ways_where_the_manifest_says_so(make_service: MakeService) -> None:
    container = container_of(render(make_service(engine={"kvTransfer": True})))
    config = json.loads(dict(pairwise(container["command"]))["--kv-transfer-config"])

    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert {"POD_IP", "KVASIR_REVISION"} <= {each["name"] for each in container["env"]}
    assert 5600 in [port["containerPort"] for port in container["ports"]]


def test_pods_of_each_role_exchange_kv_with_one_another_where_the_manifest_says_so(make_service: MakeService) -> None:
    service = make_service(disaggregation={"prefill": {}, "decode": {}}, engine={"kvTransfer": True})
    for role in engine_roles(service, SETTINGS.defaults):
        container = container_of(engine_group(service, role, REVISION, WantedGroup(0), SETTINGS))
        assert json.loads(dict(pairwise(container["command"]))["--kv-transfer-config"])["kv_role"] == "kv_both"


def test_a_role_that_does_both_exchanges_none_by_default(make_service: MakeService) -> None:
    container = container_of(render(make_service()))

    assert "--kv-transfer-config" not in container["command"]
    assert 5600 not in [port["containerPort"] for port in container["ports"]]


def test_its_pods_share_the_services_secret_by_which_ranks_let_one_another_in(staged: InferenceService) -> None:
    [variable] = [each for each in container_of(render(staged))["env"] if each["name"] == "KVASIR_ROUTER_SECRET"]

    assert variable["valueFrom"]["secretKeyRef"]["name"] == "llama-router"


def test_a_queue_of_kueue_admits_all_pods_of_a_group_at_once(make_service: MakeService) -> None:
    pod = {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}, "annotations": {"a": "b"}}
    group = render(make_service(parallelism={"pipeline": 4}, pod=pod))
    metadata = group["spec"]["template"]["metadata"]

    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == group["metadata"]["name"]
    assert metadata["annotations"] == {
        "a": "b",
        "kueue.x-k8s.io/pod-group-total-count": "4",
        "kueue.x-k8s.io/pod-group-serving": "true",
    }
    # Kueue cannot scale a StatefulSet that is its own.
    assert "kueue.x-k8s.io/queue-name" not in group["metadata"]["labels"]


def test_volcano_learns_how_many_pods_a_group_has(make_service: MakeService) -> None:
    group = render(make_service(parallelism={"pipeline": 4}, pod={"schedulerName": "volcano"}))

    assert group["metadata"]["annotations"]["scheduling.volcano.sh/group-min-member"] == "4"
