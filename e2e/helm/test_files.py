"""What helm makes of the chart's files; no cluster is asked."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.helm.helm import CHART, CI_FILES, Helm, HelmError

CI = CHART / "ci"
# What is given, and how the refusal names it.
REFUSED = [
    ("operator.replica=3", "replica"),
    ("operator.replicas=two", "replicas"),
    ("operator.workers=0", "workers"),
    ("operator.extraArgs={workers}", "extraArgs"),
    ("images.pullPolicy=Sometimes", "pullPolicy"),
    ("images.operator.digest=latest", "digest"),
    ("watch.namespace=Models", "namespace"),
    ("watch.namespaces={models}", "namespaces"),
    ("monitoring.podMonitor.enabled=yes", "enabled"),
    ("networkPolicy.apiServerPorts={0}", "apiServerPorts"),
    ("operater.replicas=2", "operater"),
]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [obj for obj in objects if obj["kind"] == kind]


@pytest.mark.parametrize("file", CI_FILES, ids=lambda file: file.stem)
def test_lint_finds_nothing(offline_helm: Helm, file: Path) -> None:
    offline_helm.run("lint", CHART, "--strict", "--values", file)


@pytest.mark.parametrize(("given", "name"), REFUSED)
def test_a_wrong_value_is_refused_by_name(offline_helm: Helm, given: str, name: str) -> None:
    with pytest.raises(HelmError) as refusal:
        offline_helm.template("--set", given)
    assert "schema" in str(refusal.value)
    assert f"'{name}'" in str(refusal.value) or f"/{name}" in str(refusal.value)


def test_a_cluster_that_is_too_old_is_refused(offline_helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"1\.30"):
        offline_helm.template("--kube-version", "1.29.9")
    offline_helm.template("--kube-version", "v1.31.2-eks-7f9249a")


def test_the_package_holds_the_crds(offline_helm: Helm, tmp_path: Path) -> None:
    offline_helm.run("package", CHART, "--destination", tmp_path)
    [package] = tmp_path.glob("kvasir-*.tgz")
    with tarfile.open(package) as archive:
        names = archive.getnames()
    assert {f"kvasir/files/crds/{path.name}" for path in (CHART / "files" / "crds").iterdir()} <= set(names)
    assert not any(name.startswith("kvasir/ci/") for name in names)


def test_the_crd_is_that_of_the_repository_and_is_kept(offline_helm: Helm) -> None:
    [crd] = of_kind(offline_helm.template(), "CustomResourceDefinition")
    [source] = (yaml.safe_load(path.read_text()) for path in (CHART / "files" / "crds").iterdir())
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert crd == source


def test_crds_can_be_left_out_or_let_go(offline_helm: Helm) -> None:
    assert of_kind(offline_helm.template("--set", "crds.install=false"), "CustomResourceDefinition") == []
    [crd] = of_kind(offline_helm.template("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert "annotations" not in crd["metadata"]


def test_a_namespaced_release_has_no_object_outside_its_namespaces(offline_helm: Helm) -> None:
    objects = offline_helm.template("--values", CI / "namespaced-values.yaml")
    assert {obj["metadata"].get("namespace") for obj in objects} == {"kvasir-system", "models"}
    [deployment] = of_kind(objects, "Deployment")
    assert "--namespace=models" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]


def test_values_reach_the_pod(offline_helm: Helm) -> None:
    [deployment] = of_kind(offline_helm.template("--values", CI / "restricted-values.yaml"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    registry = "registry.example.com/kvasir"
    assert container["image"] == f"{registry}/kvasir-operator@sha256:{1:064d}"
    assert f"--runtime-image={registry}/runtime-cuda:nightly" in container["args"]
    assert f"--router-image={registry}/kvasir-router@sha256:{2:064d}" in container["args"]
    assert "--image-pull-secret=mirror" in container["args"]
    assert "--retry-max-seconds=60" in container["args"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_pods_are_spread_by_their_own_labels(offline_helm: Helm) -> None:
    [deployment] = of_kind(offline_helm.template(), "Deployment")
    selector = deployment["spec"]["selector"]
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [each["labelSelector"] for each in spread] == [selector, selector]
    assert {each["whenUnsatisfiable"] for each in spread} == {"ScheduleAnyway"}


def test_monitoring_objects_are_made_where_their_kinds_are_known(offline_helm: Helm) -> None:
    versions = [f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")]
    known = offline_helm.template(*(f"--api-versions={version}" for version in versions))
    assert len(of_kind(known, "PodMonitor")) == 3
    assert len(of_kind(known, "PrometheusRule")) == 1
    assert of_kind(known, "ServiceMonitor") == []
    unknown = offline_helm.template()
    assert not any(obj["apiVersion"].startswith("monitoring") for obj in unknown)


def test_a_service_monitor_without_its_service_is_refused(offline_helm: Helm) -> None:
    given = "monitoring.serviceMonitor.enabled=true,metrics.service.enabled=false"
    with pytest.raises(HelmError, match=r"metrics\.service\.enabled is false: set it to true"):
        offline_helm.template("--set", given)
