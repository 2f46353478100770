"""Which children a service has, and what holds for all of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.gateways import WITH_GATEWAY

from kvasir_operator.api.labels import REVISION_LABEL, REVISION_NUMBER, SERVICE_LABEL, TRAFFIC_WEIGHT, workload_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.objects import CurrentRevision, DesiredService, desired_objects, desired_service
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.kube.kinds import object_key
from kvasir_operator.resources.router_secret import router_secret_name, with_random_value
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


def kinds_and_names(service: InferenceService) -> list[tuple[str, str]]:
    return [(child["kind"], child["metadata"]["name"]) for child in desired_objects(service, SETTINGS)]


def child(service: InferenceService, kind: str, name: str) -> dict[str, Any]:
    found = {(c["kind"], c["metadata"]["name"]): c for c in desired_objects(service, SETTINGS)}
    return found[(kind, name)]


def engine_of(service: InferenceService, role: str = "serve") -> str:
    """Name of the current revision's Deployment and Service."""
    return workload_name(service.name, role, desired_service(service, SETTINGS).revision)


def test_identities_and_services_come_before_the_pods_that_use_them(make_service: MakeService) -> None:
    service = make_service(replicas=2)
    assert kinds_and_names(service) == [
        ("Secret", "llama-router"),
        ("ServiceAccount", "llama-engine"),
        ("ServiceAccount", "llama-router"),
        ("RoleBinding", "llama-router"),
        ("Service", "llama-router"),
        ("Service", "llama-router-peers"),
        ("NetworkPolicy", "llama-engine"),
        ("NetworkPolicy", "llama-router"),
        ("PodDisruptionBudget", "llama-serve"),
        ("PodDisruptionBudget", "llama-router"),
        ("Deployment", "llama-router"),
        ("Service", engine_of(service)),
        ("Deployment", engine_of(service)),
    ]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_keys_are_those_of_all_objects(make_service: MakeService, pipeline: int) -> None:
    wanted = desired_service(
        make_service(replicas=2, parallelism={"pipeline": pipeline}), SETTINGS, with_pod_monitors=True
    )
    current = CurrentRevision(wanted.revision, 1, wanted.replicas)
    assert sorted(wanted.keys, key=str) == sorted(map(object_key, wanted.objects(current)), key=str)


def test_pod_monitors_are_made_where_the_cluster_knows_them(make_service: MakeService) -> None:
    shared = desired_service(make_service(), SETTINGS, with_pod_monitors=True).shared
    names = [each["metadata"]["name"] for each in shared if each["kind"] == "PodMonitor"]
    assert names == ["llama-serve", "llama-router"]
    assert "PodMonitor" not in [kind for kind, _ in kinds_and_names(make_service())]


def test_prefill_and_decode_have_a_workload_each_of_one_revision(make_service: MakeService) -> None:
    service = make_service(disaggregation={"prefill": {}, "decode": {}})
    names = {name for kind, name in kinds_and_names(service) if kind == "Deployment"}
    assert names == {engine_of(service, "prefill"), engine_of(service, "decode"), "llama-router"}


def test_a_replica_of_several_pods_is_a_statefulset_of_its_own(make_service: MakeService) -> None:
    service = make_service(replicas=2, parallelism={"pipeline": 3})
    engine = engine_of(service)
    named = kinds_and_names(service)

    assert [name for kind, name in named if kind == "StatefulSet"] == [f"{engine}-0", f"{engine}-1"]
    assert [name for kind, name in named if kind == "Deployment"] == ["llama-router"]
    assert {name for kind, name in named if kind == "Service"} == {
        engine,
        "llama-serve-ranks",
        "llama-router",
        "llama-router-peers",
    }


def test_prefill_and_decode_of_stages_are_groups_with_a_meeting_place_each(make_service: MakeService) -> None:
    role = {"parallelism": {"pipeline": 2}}
    service = make_service(disaggregation={"prefill": role | {"replicas": 2}, "decode": role})
    prefill, decode = (engine_of(service, name) for name in ("prefill", "decode"))
    named = kinds_and_names(service)

    assert {name for kind, name in named if kind == "StatefulSet"} == {f"{prefill}-0", f"{prefill}-1", f"{decode}-0"}
    assert {"llama-prefill-ranks", "llama-decode-ranks"} <= {name for kind, name in named if kind == "Service"}


def test_a_rollout_decides_which_groups_there_are_and_which_nodes_they_avoid(make_service: MakeService) -> None:
    wanted = desired_service(make_service(replicas=2, parallelism={"pipeline": 2}), SETTINGS)
    groups = {"serve": (WantedGroup(1), WantedGroup(4, ("bad",)))}
    *_, first, second = wanted.objects(CurrentRevision(wanted.revision, 7, {"serve": 2}, groups=groups))

    assert [each["metadata"]["name"].rpartition("-")[2] for each in (first, second)] == ["1", "4"]
    assert first["metadata"]["annotations"][REVISION_NUMBER] == "7"
    assert "affinity" not in first["spec"]["template"]["spec"]
    assert "bad" in json.dumps(second["spec"]["template"]["spec"]["affinity"])


def test_neither_group_nor_node_is_part_of_the_revision(make_service: MakeService) -> None:
    """Every group of a revision has one template but for its own name."""
    service = make_service(replicas=2, parallelism={"pipeline": 2})
    first, second = [each for each in desired_objects(service, SETTINGS) if each["kind"] == "StatefulSet"]
    names = [each["metadata"]["name"] for each in (first, second)]

    assert json.dumps(first["spec"]).replace(names[0], "") == json.dumps(second["spec"]).replace(names[1], "")


def test_a_rollout_decides_on_replicas_number_and_weight(make_service: MakeService) -> None:
    wanted = desired_service(make_service(replicas=4), SETTINGS)
    objects = wanted.objects(CurrentRevision(wanted.revision, 7, {"serve": 1}, traffic_weight=10))
    *_, service, deployment = objects
    assert deployment["spec"]["replicas"] == 1
    assert deployment["metadata"]["annotations"] == {REVISION_NUMBER: "7"}
    assert service["metadata"]["labels"][TRAFFIC_WEIGHT] == "10"


def test_no_pods_are_asked_for_with_a_feature_that_blocks(make_service: MakeService) -> None:
    service = make_service(replicas=2, engine={"quantization": "int8"})
    assert child(service, "Deployment", engine_of(service))["spec"]["replicas"] == 0
    assert "spec.engine.quantization" in (desired_service(service, SETTINGS).blocked or "")
    assert desired_service(make_service(), SETTINGS).blocked is None


def test_a_single_pod_has_no_disruption_budget(make_service: MakeService) -> None:
    kinds = [kind for kind, _ in kinds_and_names(make_service(replicas=1, router={"replicas": 1}))]

    assert "PodDisruptionBudget" not in kinds


def test_the_engine_gets_no_account_of_its_own_where_the_manifest_names_one(make_service: MakeService) -> None:
    service = make_service(pod={"serviceAccountName": "mine"})
    pod_spec = child(service, "Deployment", engine_of(service))["spec"]["template"]["spec"]

    assert ("ServiceAccount", "llama-engine") not in kinds_and_names(service)
    assert pod_spec["serviceAccountName"] == "mine"


def test_every_child_is_labelled_namespaced_and_owned(make_service: MakeService) -> None:
    for manifest in desired_objects(make_service(uid="u-1"), SETTINGS):
        metadata = manifest["metadata"]
        [owner] = metadata["ownerReferences"]
        assert metadata["namespace"] == "models"
        assert metadata["labels"][SERVICE_LABEL] == "llama"
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceService", "u-1", True)


def test_a_service_from_a_file_owns_nothing(make_service: MakeService) -> None:
    assert not any("ownerReferences" in c["metadata"] for c in desired_objects(make_service(), SETTINGS))


def test_a_revision_selects_its_own_pods_and_no_others(make_service: MakeService) -> None:
    service = make_service()
    deployment, headless = (child(service, kind, engine_of(service)) for kind in ("Deployment", "Service"))
    pod_labels = deployment["spec"]["template"]["metadata"]["labels"]
    revision = desired_service(service, SETTINGS).revision
    for labelled in (deployment["metadata"]["labels"], headless["metadata"]["labels"], pod_labels):
        assert labelled[REVISION_LABEL] == revision
    for selector in (deployment["spec"]["selector"]["matchLabels"], headless["spec"]["selector"]):
        assert selector[REVISION_LABEL] == revision
        assert selector.items() <= pod_labels.items()


def test_budgets_and_the_routers_service_select_the_pods_they_are_for(make_service: MakeService) -> None:
    service = make_service(replicas=2)
    for name, budget in ((engine_of(service), "llama-serve"), ("llama-router", "llama-router")):
        pod_labels = child(service, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        selector = child(service, "PodDisruptionBudget", budget)["spec"]["selector"]["matchLabels"]
        assert selector.items() <= pod_labels.items()
    assert child(service, "Service", "llama-router")["spec"]["selector"].items() <= pod_labels.items()


def test_router_and_engine_hold_the_same_secret(make_service: MakeService) -> None:
    service = make_service()
    secret = child(service, "Secret", "llama-router")
    variables = [
        [each for each in container["env"] if each["name"] == "KVASIR_ROUTER_SECRET"]
        for name in (engine_of(service), "llama-router")
        for container in child(service, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    ]
    [key] = with_random_value(secret)["stringData"]

    assert variables == 2 * [
        [{"name": "KVASIR_ROUTER_SECRET", "valueFrom": {"secretKeyRef": {"name": "llama-router", "key": key}}}]
    ]


def test_the_secrets_value_is_in_no_desired_object_and_drawn_anew_each_time(make_service: MakeService) -> None:
    secret = child(make_service(), "Secret", "llama-router")
    values = {value for _ in range(2) for value in with_random_value(secret)["stringData"].values()}

    assert not {"data", "stringData"} & secret.keys()
    assert len(values) == 2
    assert min(map(len, values)) >= 43  # 256 bits, six a character


def test_the_same_service_gives_the_same_objects(make_service: MakeService) -> None:
    first, second = (desired_objects(make_service(), SETTINGS) for _ in range(2))

    assert json.dumps(first) == json.dumps(second)


def test_behind_the_gateway_a_service_has_its_engines_and_no_router(make_service: MakeService) -> None:
    service = make_service(replicas=2, router={"mode": "gateway"})
    wanted = desired_service(service, WITH_GATEWAY, with_pod_monitors=True)
    objects = wanted.objects(CurrentRevision(wanted.revision, 1, wanted.replicas))
    engine = workload_name("llama", "serve", wanted.revision)
    secret, *others = [(each["kind"], each["metadata"]["name"]) for each in objects]

    assert secret == ("Secret", router_secret_name(service, WITH_GATEWAY))
    assert others == [
        ("ServiceAccount", "llama-engine"),
        ("NetworkPolicy", "llama-engine"),
        ("PodDisruptionBudget", "llama-serve"),
        ("PodMonitor", "llama-serve"),
        ("Service", engine),
        ("Deployment", engine),
    ]
    assert wanted.blocked is None


def test_its_engines_are_found_as_those_of_any_service(make_service: MakeService) -> None:
    dedicated, behind = (
        desired_service(make_service(router=router), WITH_GATEWAY) for router in ({}, {"mode": "gateway"})
    )
    services = [
        [each["metadata"]["labels"] | {"serving.kvasir.dev/revision": ""} for each in engine_services(wanted)]
        for wanted in (dedicated, behind)
    ]
    assert services[0] == services[1]


def engine_services(wanted: DesiredService) -> list[dict[str, Any]]:
    objects = wanted.objects(CurrentRevision(wanted.revision, 1, wanted.replicas))
    return [each for each in objects if each["kind"] == "Service" and REVISION_LABEL in each["metadata"]["labels"]]


def test_a_gateway_that_is_not_there_gets_no_pods_and_is_another_revision(make_service: MakeService) -> None:
    """So a service that runs goes on as it is, as with any revision that cannot start."""
    behind, dedicated = make_service(router={"mode": "gateway"}), make_service()
    without = desired_service(behind, SETTINGS)

    assert "set gateway.enabled" in (without.blocked or "")
    revisions = {
        desired_service(service, settings).revision
        for service in (behind, dedicated)
        for settings in (SETTINGS, WITH_GATEWAY)
    }
    assert len(revisions) == 3
    assert not any(each["kind"] == "Secret" for each in desired_objects(behind, SETTINGS))
    deployments = [each for each in desired_objects(behind, SETTINGS) if each["kind"] == "Deployment"]
    assert [each["spec"]["replicas"] for each in deployments] == [0]
