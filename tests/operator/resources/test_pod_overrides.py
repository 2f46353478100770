"""The manifest's pod fields, which engine and router pods have alike."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults, RouterDefaults
from kvasir_operator.api.model import ObjectRef, PodSpec, ResourcesSpec, RouterResources, Toleration
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.settings import OperatorSettings

RenderPod = Callable[..., dict[str, Any]]
HUNGRY = InstallationDefaults(
    engine=PodDefaults(resources=ResourcesSpec(memory=Quantity("90Gi"), cpu_limit=Quantity("64"))),
    router=RouterDefaults(resources=RouterResources(memory=Quantity("2Gi"), cpu_limit=Quantity("2"))),
)
PASSED_ON = {
    "nodeSelector": {"gpu": "l4", "kubernetes.io/arch": "arm64"},
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "mirror"}],
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
}


@pytest.mark.parametrize("field", PASSED_ON)
def test_a_field_reaches_the_pod(template: RenderPod, field: str) -> None:
    assert template(pod={field: PASSED_ON[field]})["spec"][field] == PASSED_ON[field]


@pytest.mark.parametrize("field", [field for field in PASSED_ON if field != "nodeSelector"])
def test_a_field_that_nobody_sets_is_left_to_the_cluster(template: RenderPod, field: str) -> None:
    assert field not in template()["spec"]


def test_a_toleration_without_an_operator_compares_values(template: RenderPod) -> None:
    assert template(pod={"tolerations": [{"key": "gpu"}]})["spec"]["tolerations"] == [
        {"key": "gpu", "operator": "Equal"}
    ]


def test_the_image_of_the_manifest_is_run(template: RenderPod) -> None:
    assert template(pod={"image": "mine:1"})["spec"]["containers"][0]["image"] == "mine:1"


def test_images_are_pulled_when_the_installation_says(template: RenderPod) -> None:
    [container] = template(OperatorSettings(image_pull_policy="Never"))["spec"]["containers"]

    assert container["imagePullPolicy"] == "Never"


def test_a_pod_requests_all_memory_that_it_may_use(template: RenderPod) -> None:
    """Or its node could take it from where it serves because a neighbour grows."""
    for settings in (OperatorSettings(), OperatorSettings(defaults=HUNGRY)):
        [container] = template(settings)["spec"]["containers"]
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_one_setting_makes_the_log_of_every_pod_json(template: RenderPod) -> None:
    [container] = template(OperatorSettings(log_format="json"))["spec"]["containers"]
    assert ("--log-format", "json") in pairwise(container["command"])


def test_no_pod_is_made_anew_for_the_log_that_it_writes_anyway(template: RenderPod) -> None:
    [container] = template()["spec"]["containers"]
    assert "--log-format" not in container["command"]


def test_the_manifests_variable_wins_over_ours_and_ours_are_kept(template: RenderPod) -> None:
    env = [{"name": "HOME", "value": "/home/me"}, {"name": "A", "value": "1"}]
    [container] = template(pod={"env": env})["spec"]["containers"]

    assert {each["name"]: each.get("value") for each in container["env"]} == {
        "HOME": "/home/me",
        "A": "1",
        "KVASIR_ROUTER_SECRET": None,
    }


def test_labels_of_the_manifest_cannot_hide_our_own(template: RenderPod) -> None:
    pod = {"labels": {"team": "search", "app.kubernetes.io/managed-by": "me"}, "annotations": {"a": "b"}}
    metadata = template(pod=pod)["metadata"]

    assert metadata["labels"]["team"] == "search"
    assert metadata["labels"]["app.kubernetes.io/managed-by"] == "kvasir-operator"
    assert metadata["annotations"]["a"] == "b"


def test_pods_are_spread_unless_told_otherwise(template: RenderPod) -> None:
    own_labels = template()["metadata"]["labels"]
    spread = template()["spec"]["topologySpreadConstraints"]

    assert [c["topologyKey"] for c in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert {c["whenUnsatisfiable"] for c in spread} == {"ScheduleAnyway"}
    assert all(c["labelSelector"]["matchLabels"].items() <= own_labels.items() for c in spread)
    assert template(pod={"topologySpread": "auto"})["spec"]["topologySpreadConstraints"] == spread
    assert "topologySpreadConstraints" not in template(pod={"topologySpread": "none"})["spec"]


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"configMap": {"name": "ca"}}, {"configMap": {"name": "ca"}}),
        ({"secret": {"name": "ca"}}, {"secret": {"secretName": "ca"}}),
        ({"claim": {"name": "files"}}, {"persistentVolumeClaim": {"claimName": "files", "readOnly": True}}),
    ],
)
def test_files_are_mounted_read_only_where_the_manifest_says(
    template: RenderPod, volume: dict[str, Any], source: dict[str, Any]
) -> None:
    two = [{"mountPath": "/first", "configMap": {"name": "other"}}, {"mountPath": "/etc/ssl/own", **volume}]
    pod = template(pod={"volumes": two})["spec"]
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["mountPath"] == "/etc/ssl/own"]

    assert mount["readOnly"]
    assert {"name": mount["name"], **source} in pod["volumes"]
    assert len({each["name"] for each in pod["volumes"]}) == len(pod["volumes"])


def test_images_are_pulled_with_the_secrets_of_installation_and_manifest(template: RenderPod) -> None:
    settings = OperatorSettings(image_pull_secret=("hub", "mirror"))
    pod = template(settings, pod={"imagePullSecrets": [{"name": "mirror"}, {"name": "own"}]})["spec"]

    assert pod["imagePullSecrets"] == [{"name": "hub"}, {"name": "mirror"}, {"name": "own"}]


def test_the_manifest_wins_over_what_the_installation_sets_for_all_pods(template: RenderPod) -> None:
    everywhere = PodSpec(
        tolerations=(Toleration(key="gpu", operator="Exists"),),
        runtime_class_name="nvidia",
        image_pull_secrets=(ObjectRef("hub"),),
        labels={"team": "platform", "tier": "gold"},
    )
    defaults = InstallationDefaults(engine=PodDefaults(pod=everywhere), router=RouterDefaults(pod=everywhere))
    rendered = template(
        OperatorSettings(defaults=defaults), pod={"runtimeClassName": "kata", "labels": {"team": "search"}}
    )

    assert rendered["spec"]["runtimeClassName"] == "kata"
    assert rendered["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert rendered["spec"]["imagePullSecrets"] == [{"name": "hub"}]
    assert {key: rendered["metadata"]["labels"][key] for key in ("team", "tier")} == {"team": "search", "tier": "gold"}


def test_pods_go_where_the_images_run(template: RenderPod) -> None:
    def architecture(*of_images: str, **pod: Any) -> str | None:
        settings = OperatorSettings(image_architecture=of_images) if of_images else OperatorSettings()
        selector: dict[str, str] = template(settings, pod=pod)["spec"].get("nodeSelector", {})
        return selector.get("kubernetes.io/arch")

    assert architecture() == "amd64"
    assert architecture("arm64") == "arm64"
    assert architecture("amd64", "arm64") is None
    assert architecture(nodeSelector={"kubernetes.io/arch": "arm64"}) == "arm64"
