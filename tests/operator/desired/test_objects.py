"""Which children a service has, and what holds for all of them."""

import json
from collections.abc import Callable
from typing import Any

from kvasir_operator.api.labels import POD_MONITOR_LABEL, REVISION_LABEL, SERVICE_LABEL
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired import desired_objects, revision_of
from kvasir_operator.resources.router_secret import with_random_value
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


def kinds_and_names(service: InferenceService) -> list[tuple[str, str]]:
    return [(child["kind"], child["metadata"]["name"]) for child in desired_objects(service, SETTINGS)]


def child(service: InferenceService, kind: str, name: str) -> dict[str, Any]:
    found = {(c["kind"], c["metadata"]["name"]): c for c in desired_objects(service, SETTINGS)}
    return found[(kind, name)]


def test_identities_and_services_come_before_the_pods_that_use_them(make_service: MakeService) -> None:
    assert kinds_and_names(make_service(replicas=2)) == [
        ("Secret", "llama-router"),
        ("ServiceAccount", "llama-engine"),
        ("Service", "llama-engine"),
        ("PodDisruptionBudget", "llama-engine"),
        ("Deployment", "llama-engine"),
        ("ServiceAccount", "llama-router"),
        ("Role", "llama-router"),
        ("RoleBinding", "llama-router"),
        ("Service", "llama-router"),
        ("PodDisruptionBudget", "llama-router"),
        ("Deployment", "llama-router"),
    ]


def test_a_single_pod_has_no_disruption_budget(make_service: MakeService) -> None:
    kinds = [kind for kind, _ in kinds_and_names(make_service(replicas=1, router={"replicas": 1}))]

    assert "PodDisruptionBudget" not in kinds


def test_the_engine_gets_no_account_of_its_own_where_the_manifest_names_one(make_service: MakeService) -> None:
    service = make_service(pod={"serviceAccountName": "mine"})

    assert ("ServiceAccount", "llama-engine") not in kinds_and_names(service)
    assert child(service, "Deployment", "llama-engine")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


def test_every_child_is_labelled_namespaced_and_owned(make_service: MakeService) -> None:
    for manifest in desired_objects(make_service(uid="u-1"), SETTINGS):
        metadata = manifest["metadata"]
        [owner] = metadata["ownerReferences"]
        assert metadata["namespace"] == "models"
        assert metadata["labels"][SERVICE_LABEL] == "llama"
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceService", "u-1", True)


def test_a_service_from_a_file_owns_nothing(make_service: MakeService) -> None:
    assert not any("ownerReferences" in c["metadata"] for c in desired_objects(make_service(), SETTINGS))


def test_the_revision_is_on_the_deployment_and_its_pods_but_not_in_the_selector(make_service: MakeService) -> None:
    service = make_service()
    deployment = child(service, "Deployment", "llama-engine")
    spec = deployment["spec"]

    assert deployment["metadata"]["labels"][REVISION_LABEL] == revision_of(service)
    assert spec["template"]["metadata"]["labels"][REVISION_LABEL] == revision_of(service)
    assert REVISION_LABEL not in spec["selector"]["matchLabels"]


def test_pods_are_labelled_only_where_they_are_not_to_be_scraped(make_service: MakeService) -> None:
    for name in ("llama-engine", "llama-router"):
        scraped, left_out = (
            child(make_service(monitoring=monitoring), "Deployment", name)["spec"]["template"]["metadata"]["labels"]
            for monitoring in ({}, {"podMonitor": "none"})
        )
        assert set(left_out) - set(scraped) == {POD_MONITOR_LABEL}


def test_selectors_match_the_pods_they_are_for(make_service: MakeService) -> None:
    service = make_service(replicas=2)
    for name in ("llama-engine", "llama-router"):
        pod_labels = child(service, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        selectors = [
            child(service, "Service", name)["spec"]["selector"],
            child(service, "Deployment", name)["spec"]["selector"]["matchLabels"],
            child(service, "PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
        ]
        assert all(selector.items() <= pod_labels.items() for selector in selectors)


def test_router_and_engine_hold_the_same_secret(make_service: MakeService) -> None:
    service = make_service()
    secret = child(service, "Secret", "llama-router")
    variables = [
        [each for each in container["env"] if each["name"] == "KVASIR_ROUTER_SECRET"]
        for name in ("llama-engine", "llama-router")
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
