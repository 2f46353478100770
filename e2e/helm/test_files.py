"""What helm makes of the chart's files; no cluster is asked."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.helm.helm import CHART, CI_FILES, Helm, HelmError
from e2e.helm.installed import OPERATOR, POD_DEFAULTS
from tests.charts.chart_alerts import rule_groups

CI = CHART / "ci"
# What is given, and how the refusal names it.
REFUSED = [
    ("operator.replica=3", "replica"),
    ("operator.replicas=two", "replicas"),
    ("operator.workers=0", "workers"),
    ("operator.extraArgs={workers}", "extraArgs"),
    ("operator.workers=null", "workers"),
    ("operator.extraArgs={--retry}", "extraArgs"),
    ("podDefaults.engine.pod.labels.team=R&D", "labels"),
    ("podDefaults.engine.pod.securityContext.fsGruop=2000", "fsGruop"),
    ("images.pullPolicy=Sometimes", "pullPolicy"),
    ("images.operator.digest=latest", "digest"),
    ("watch.namespace=models", "namespace"),
    ("watch.namespaces={Models}", "namespaces"),
    ("watch.namespaces={models,models}", "namespaces"),
    ("watch.clusterLeaseNamespace=", "clusterLeaseNamespace"),
    ("podDefaults.engine.pod.nodeselector.a=b", "nodeselector"),
    ("podDefaults.router.resources.sharedMemory=1Gi", "sharedMemory"),
    ("profiles.H100.pod.image=a", "H100"),
    ("profiles.h100.resources.profile=h200", "profile"),
    ("proxy.httpProxy=proxy.example.com:3128", "httpProxy"),
    ("monitoring.prometheusRule.alerts.KvasirDown.enabled=false", "KvasirDown"),
    ("monitoring.prometheusRule.alerts.KvasirOperatorDown.for=soon", "for"),
    ("monitoring.prometheusRule.alerts.KvasirOperatorDown.threshold=1", "threshold"),
    ("monitoring.prometheusRule.slo.availability=0.9", "availability"),
    ("monitoring.prometheusRule.slo.timeToFirstToken.seconds=3", "seconds"),
    ("monitoring.podMonitor.enabled=yes", "enabled"),
    ("monitoring.dashboards.namespace=Grafana", "namespace"),
    ("networkPolicies.apiServerPorts={0}", "apiServerPorts"),
    ("networkPolicies.metricsFrom[0].podSelector.a=b", "podSelector"),
    ("images.architectures=", "architectures"),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gateway.extraArgs={--max-body-size=512Mi}", "--max-body-size 512Mi is more than --max-held-body-size 256Mi"),
        ("gateway.extraArgs={--max-held-body-size=60M}", "--max-body-size 64Mi is more than --max-held-body-size 60M"),
        (
            "gateway.extraArgs={--max-body-size=2Gi,--max-held-body-size=2147483647}",
            "gateway.extraArgs: --max-body-size 2Gi is more than --max-held-body-size 2147483647",
        ),
        (
            "operator.extraArgs={--retry-initial-seconds=31}",
            "--retry-initial-seconds 31 is more than --retry-max-seconds 30",
        ),
        (
            "operator.resources.requests.memory=1Gi",
            "operator.resources.requests.memory 1Gi is more than limits.memory 512Mi",
        ),
        ("gateway.resources.limits.cpu=999m", "gateway.resources.requests.cpu 1 is more than limits.cpu 999m"),
        (
            "podDefaults.engine.resources.cpu=2,podDefaults.engine.resources.cpuLimit=1",
            "podDefaults.engine.resources.cpu 2 is more than cpuLimit 1",
        ),
        (
            "podDefaults.router.resources.cpu=2,podDefaults.router.resources.cpuLimit=1999m",
            "podDefaults.router.resources.cpu 2 is more than cpuLimit 1999m",
        ),
        (
            "profiles.a.resources.cpu=2,profiles.a.resources.cpuLimit=1",
            "profiles.a.resources.cpu 2 is more than cpuLimit 1",
        ),
    ],
)
def test_what_exceeds_what_it_must_not_is_refused_with_both(offline_helm: Helm, given: str, message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        offline_helm.template("--set", given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "given",
    [
        "gateway.extraArgs={--max-body-size=512Mi,--max-held-body-size=512Mi}",
        "gateway.extraArgs={--max-held-body-size=1G,--max-body-size=900M}",
        "operator.resources.limits.memory=536870912,operator.resources.requests.memory=1e8",
        "operator.resources.limits.cpu=1,operator.resources.requests.cpu=1000m",
        "operator.resources=null",
        "podDefaults=null",
    ],
)
def test_what_is_within_is_taken(offline_helm: Helm, given: str) -> None:
    offline_helm.template("--set", given)


def test_a_registry_must_be_named(offline_helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"images\.registry is empty: name the registry .* --set images\.registry="):
        offline_helm.template("--set", "images.registry=")


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
    assert {obj["metadata"].get("namespace") for obj in objects} == {"kvasir-system", "models", "more-models"}
    args = operator_container(objects)["args"]
    assert [arg for arg in args if "namespace" in arg] == ["--namespace=models", "--namespace=more-models"]


def test_a_cluster_wide_release_has_a_lease_of_its_own_and_one_that_all_such_releases_share(offline_helm: Helm) -> None:
    objects = offline_helm.template("--set", "watch.clusterLeaseNamespace=kvasir-leases")
    assert {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in of_kind(objects, "Lease")} == {
        ("kvasir-system", "kvasir-operator"),
        ("kvasir-leases", "kvasir-operator-cluster-wide"),
    }
    args = operator_container(objects)["args"]
    assert {"--lease-namespace=kvasir-system", "--cluster-lease-namespace=kvasir-leases"} <= set(args)


def operator_container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [deployment] = of_kind(objects, "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def pod_defaults(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [deployment] = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == OPERATOR]
    text = deployment["spec"]["template"]["metadata"]["annotations"][POD_DEFAULTS]
    defaults: dict[str, Any] = yaml.safe_load(text)
    return defaults


def test_pod_defaults_and_profiles_reach_the_operator_as_a_file(offline_helm: Helm) -> None:
    objects = offline_helm.template("--values", CI / "platform-values.yaml")
    given = yaml.safe_load((CI / "platform-values.yaml").read_text())
    defaults = pod_defaults(objects)
    assert defaults["profiles"] == given["profiles"]
    assert defaults["router"] == given["podDefaults"]["router"]
    # A null of a values file stays one: it leaves the field to the platform.
    assert defaults["engine"]["pod"]["securityContext"] == {"fsGroup": 2000, "seccompProfile": None}
    assert "--pod-defaults=/etc/kvasir/pod-defaults.yaml" in operator_container(objects)["args"]


def test_a_change_of_the_defaults_makes_new_pods_of_the_operator_and_nothing_else_does(offline_helm: Helm) -> None:
    def pods(*arguments: str) -> str:
        [deployment] = of_kind(offline_helm.template(*arguments), "Deployment")
        return json.dumps(deployment["spec"]["template"])

    assert pods("--set", "monitoring.podMonitor.enabled=true") == pods()
    assert pods("--set", "profiles.h100.resources.cpu=8") != pods()


def test_former_pods_keep_their_defaults_when_they_restart_beside_new_ones_that_do_not_start(
    offline_helm: Helm,
) -> None:
    """Nothing that pods of two rollouts share: the file is the pod's own."""
    [deployment] = of_kind(offline_helm.template(), "Deployment")
    pod = deployment["spec"]["template"]
    [volume] = [each for each in pod["spec"]["volumes"] if each["name"] == "pod-defaults"]
    [item] = volume["downwardAPI"]["items"]
    assert item == {"path": "pod-defaults.yaml", "fieldRef": {"fieldPath": f"metadata.annotations['{POD_DEFAULTS}']"}}


def test_routers_get_a_role_that_the_operator_may_bind_and_not_write(offline_helm: Helm) -> None:
    objects = offline_helm.template()
    [router] = [role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"] == "kvasir-router"]
    assert router["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    [operator] = [role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"] == "kvasir-operator"]
    [bind] = [rule for rule in operator["rules"] if "bind" in rule["verbs"]]
    assert (bind["resources"], bind["resourceNames"], bind["verbs"]) == (["clusterroles"], ["kvasir-router"], ["bind"])
    assert "--router-cluster-role=kvasir-router" in operator_container(objects)["args"]


def test_a_proxy_is_for_everything_but_the_api_server(offline_helm: Helm) -> None:
    environment = {
        each["name"]: each.get("value")
        for each in operator_container(offline_helm.template("--values", CI / "platform-values.yaml"))["env"]
    }
    assert environment["HTTPS_PROXY"] == environment["HTTP_PROXY"] == "http://proxy.example.com:3128"
    assert environment["NO_PROXY"] == "$(KUBERNETES_SERVICE_HOST),.svc,.cluster.local,.example.com"
    assert environment["SSL_CERT_FILE"] == "/etc/kvasir-ca/ca-bundle.crt"
    without = {each["name"] for each in operator_container(offline_helm.template())["env"]}
    assert without == {"POD_NAME", "HOME"}


def test_certificates_of_the_platform_are_mounted(offline_helm: Helm) -> None:
    [deployment] = of_kind(offline_helm.template("--values", CI / "platform-values.yaml"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "ca-bundle"]
    assert volume["configMap"] == {"name": "ca", "items": [{"key": "ca-bundle.crt", "path": "ca-bundle.crt"}]}
    assert {"name": "ca-bundle", "mountPath": "/etc/kvasir-ca", "readOnly": True} in pod["containers"][0][
        "volumeMounts"
    ]


def test_network_policies_can_be_switched_off_for_the_operator_and_its_services(offline_helm: Helm) -> None:
    assert len(of_kind(offline_helm.template(), "NetworkPolicy")) == 1
    assert "--no-network-policies" not in operator_container(offline_helm.template())["args"]
    without = offline_helm.template("--set", "networkPolicies.enabled=false")
    assert of_kind(without, "NetworkPolicy") == []
    assert "--no-network-policies" in operator_container(without)["args"]


def test_the_operator_may_reach_prometheus_and_be_tested_by_helm(offline_helm: Helm) -> None:
    [policy] = of_kind(offline_helm.template("--values", CI / "restricted-values.yaml"), "NetworkPolicy")
    [open_policy] = of_kind(offline_helm.template(), "NetworkPolicy")
    prometheus = {"ports": [{"port": 9090, "protocol": "TCP"}]}
    assert prometheus in open_policy["spec"]["egress"]
    assert prometheus not in policy["spec"]["egress"]
    [test_pod] = of_kind(offline_helm.template(), "Pod")
    [ingress] = policy["spec"]["ingress"]
    assert ingress["from"] == [
        {"podSelector": {"matchLabels": test_pod["metadata"]["labels"]}},
        {"podSelector": {}, "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]


def test_a_managed_prometheus_is_reached_with_its_user_tenant_and_certificates_by_a_proxy(offline_helm: Helm) -> None:
    objects = offline_helm.template("--values", CI / "prometheus-values.yaml")
    folder = "/etc/kvasir-prometheus"
    assert {
        f"--prometheus-basic-auth-folder={folder}-basic-auth",
        f"--prometheus-headers-folder={folder}-headers",
        f"--prometheus-ca-file={folder}-ca/ca.crt",
    } <= set(operator_container(objects)["args"])
    [deployment] = of_kind(objects, "Deployment")
    secrets = {
        each["secret"]["secretName"] for each in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in each
    }
    assert secrets == {"prometheus-user", "prometheus-tenant"}
    [policy] = of_kind(objects, "NetworkPolicy")
    ports = [port["port"] for port in policy["spec"]["egress"][-1]["ports"]]
    assert ports == [9090, 443, 3128], "of its pods, of its address, of the proxy"


@pytest.mark.parametrize(("enabled", "num_operators"), [("true", 1), ("false", 0)])
def test_it_is_a_dependency_that_can_be_switched_off(
    enabled: str, num_operators: int, offline_helm: Helm, tmp_path: Path
) -> None:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "kvasir").symlink_to(CHART)
    dependency = {"name": "kvasir", "version": "0.1.0", "condition": "kvasir.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    given = ("--set", f"kvasir.enabled={enabled}", "--set", "global.team=a,kvasir.images.registry=registry.example.com")
    text = offline_helm.run("template", "platform", tmp_path, *given)
    assert len(of_kind([obj for obj in yaml.safe_load_all(text) if obj], "Deployment")) == num_operators


def test_policies_of_services_let_in_the_operator_and_who_reads_metrics(offline_helm: Helm) -> None:
    objects = offline_helm.template()
    [deployment] = of_kind(objects, "Deployment")
    assert pod_defaults(objects)["networkPeers"] == {
        "operator": {
            "namespaceLabels": {"kubernetes.io/metadata.name": "kvasir-system"},
            "podLabels": deployment["spec"]["selector"]["matchLabels"],
        },
        "metrics": [{"podLabels": {"app.kubernetes.io/name": "prometheus"}}],
    }


def test_monitors_of_services_have_the_labels_and_the_interval_of_the_charts_own(offline_helm: Helm) -> None:
    objects = offline_helm.template("--values", CI / "monitoring-values.yaml")
    assert pod_defaults(objects)["podMonitors"] == {"labels": {"release": "prometheus"}, "interval": "15s"}
    assert pod_defaults(offline_helm.template())["podMonitors"] == {"labels": {}}


def test_values_reach_the_pod(offline_helm: Helm) -> None:
    objects = offline_helm.template("--values", CI / "restricted-values.yaml")
    [deployment] = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = operator_container(objects)
    registry = "registry.example.com/kvasir"
    assert container["image"] == f"{registry}/kvasir-operator@sha256:{1:064d}"
    assert f"--runtime-image={registry}/runtime-cuda:nightly" in container["args"]
    assert f"--router-image={registry}/kvasir-router@sha256:{2:064d}" in container["args"]
    assert "--image-pull-secret=mirror" in container["args"]
    assert "--retry-max-seconds=60" in container["args"]
    ids = {"runAsUser": 20001, "runAsGroup": 20001}
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}


def test_no_pod_names_the_ids_that_a_platform_may_choose(offline_helm: Helm) -> None:
    objects = offline_helm.template()
    [deployment] = of_kind(objects, "Deployment")
    [test_pod] = of_kind(objects, "Pod")
    for spec in (deployment["spec"]["template"]["spec"], test_pod["spec"]):
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not {"runAsUser", "runAsGroup"} & spec["containers"][0]["securityContext"].keys()


@pytest.mark.parametrize(
    ("given", "node_selector"),
    [
        ((), {"kubernetes.io/arch": "amd64"}),
        (("--set", "images.architectures={arm64}"), {"kubernetes.io/arch": "arm64"}),
        (("--set", "images.architectures={amd64,arm64}"), None),
        (("--set", "operator.nodeSelector.pool=a"), {"pool": "a", "kubernetes.io/arch": "amd64"}),
        (("--set", "images.architectures={amd64,arm64}", "--set", "operator.nodeSelector.pool=a"), {"pool": "a"}),
        (("--set", r"operator.nodeSelector.kubernetes\.io/arch=s390x"), {"kubernetes.io/arch": "s390x"}),
    ],
    ids=["one by default", "another one", "several", "a label besides", "a label and several", "the user's own"],
)
def test_pods_keep_to_nodes_that_the_image_runs_on(
    offline_helm: Helm, given: tuple[str, ...], node_selector: dict[str, str] | None
) -> None:
    objects = offline_helm.template(*given)
    [deployment] = of_kind(objects, "Deployment")
    [test_pod] = of_kind(objects, "Pod")
    for spec in (deployment["spec"]["template"]["spec"], test_pod["spec"]):
        assert spec.get("nodeSelector") == node_selector


def test_pods_are_spread_by_their_own_labels(offline_helm: Helm) -> None:
    [deployment] = of_kind(offline_helm.template(), "Deployment")
    selector = deployment["spec"]["selector"]
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [each["labelSelector"] for each in spread] == [selector, selector]
    assert {each["whenUnsatisfiable"] for each in spread} == {"ScheduleAnyway"}


def test_monitoring_objects_are_made_where_their_kinds_are_known(offline_helm: Helm) -> None:
    versions = [f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")]
    known = offline_helm.template(*(f"--api-versions={version}" for version in versions))
    [monitor] = of_kind(known, "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] == "operator"
    assert len(of_kind(known, "PrometheusRule")) == 1
    assert of_kind(known, "ServiceMonitor") == []
    unknown = offline_helm.template()
    assert not any(obj["apiVersion"].startswith("monitoring") for obj in unknown)


def test_a_service_monitor_without_its_service_is_refused(offline_helm: Helm) -> None:
    given = "monitoring.serviceMonitor.enabled=true,metrics.service.enabled=false"
    with pytest.raises(HelmError, match=r"metrics\.service\.enabled is false: set it to true"):
        offline_helm.template("--set", given)


def dashboards(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in of_kind(objects, "ConfigMap") if "-dashboard-" in each["metadata"]["name"]]


def test_dashboards_are_made_for_the_sidecar_as_they_are_in_the_chart(offline_helm: Helm) -> None:
    made = dashboards(offline_helm.template("--values", CI / "monitoring-values.yaml"))
    files = {f"kvasir-{path.name}": json.loads(path.read_text()) for path in (CHART / "files" / "dashboards").iterdir()}
    assert {name: json.loads(text) for each in made for name, text in each["data"].items()} == files
    for each in made:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"] == {"example.com/owner": "serving", "grafana_folder": "Kvasir"}
        assert each["metadata"]["namespace"] == "kvasir-system"


def test_dashboards_are_made_where_pod_monitors_are_known_and_go_where_the_sidecar_looks(offline_helm: Helm) -> None:
    assert dashboards(offline_helm.template()) == []
    given = ("--api-versions=monitoring.coreos.com/v1/PodMonitor", "--set", "monitoring.dashboards.namespace=grafana")
    made = dashboards(offline_helm.template(*given))
    assert {each["metadata"]["namespace"] for each in made} == {"grafana"}
    assert "annotations" not in made[0]["metadata"]


def groups(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    [rule] = of_kind(objects, "PrometheusRule")
    return list(rule["spec"]["groups"])


def alerts(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups(objects) for rule in group["rules"] if "alert" in rule}


def test_the_rules_are_those_that_unit_tests_are_about(offline_helm: Helm) -> None:
    made = groups(offline_helm.template("--set", "monitoring.prometheusRule.enabled=true"))
    assert made == rule_groups()


def test_alerts_are_tuned_and_switched_off_one_by_one(offline_helm: Helm) -> None:
    untuned = alerts(offline_helm.template("--set", "monitoring.prometheusRule.enabled=true"))
    tuned = alerts(offline_helm.template("--values", CI / "monitoring-values.yaml"))
    assert set(untuned) - set(tuned) == {"KvasirKvCacheFull"}
    errors = tuned["KvasirRouterErrors"]
    assert (errors["for"], errors["labels"]) == ("1m", {"severity": "page", "team": "serving"})
    assert errors["expr"].endswith("> 0.01")
    assert untuned["KvasirRouterErrors"]["expr"].endswith("> 0.05")
    assert errors["annotations"]["runbook_url"] == "https://example.com/RUNBOOKS.md#kvasirroutererrors"
    assert "runbook_url" not in untuned["KvasirRouterErrors"]["annotations"]


def test_all_alerts_can_be_switched_off(offline_helm: Helm) -> None:
    names = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["prometheusRule"]["alerts"]
    off = [("--set", f"monitoring.prometheusRule.alerts.{name}.enabled=false") for name in names]
    given = ("--set", "monitoring.prometheusRule.enabled=true", *(part for pair in off for part in pair))
    assert groups(offline_helm.template(*given)) == []


def test_alerts_of_a_namespaced_release_speak_of_its_namespaces(offline_helm: Helm) -> None:
    given = ("--values", CI / "namespaced-values.yaml", "--set", "monitoring.prometheusRule.enabled=true")
    ours, *theirs = groups(offline_helm.template(*given))
    expressions = [rule["expr"] for group in theirs for rule in group["rules"]]
    assert all('namespace=~"models|more-models"' in expression for expression in expressions)
    assert "models" not in json.dumps([rule["expr"] for rule in ours["rules"]])


def test_the_slo_of_the_values_is_that_of_the_rules(offline_helm: Helm) -> None:
    slo = "monitoring.prometheusRule.slo"
    given = f"{slo}.availability=0.99,{slo}.timeToFirstToken.seconds=5,{slo}.leastBadRequests=3"
    made = alerts(offline_helm.template("--set-json", f"monitoring.prometheusRule.enabled=true,{given}"))
    assert "14.4 * (1 - 0.99)" in made["KvasirAvailabilityBurnFast"]["expr"]
    assert ">= 3" in made["KvasirAvailabilityBurnFast"]["expr"]
    assert "after 5 s" in made["KvasirTtftBurnSlow"]["annotations"]["summary"]


def without_elements(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each map and list in turn as an empty one, by where it is; of alerts, which are alike, the first."""
    for key, value in list(values.items())[: 1 if path[-1:] == ("alerts",) else None]:
        if isinstance(value, dict | list):
            yield (*path, key), type(value)()
        if isinstance(value, dict):
            yield from without_elements(value, (*path, key))


@pytest.mark.parametrize(("path", "empty"), without_elements(yaml.safe_load((CHART / "values.yaml").read_text())))
def test_null_is_an_empty_list_or_map_or_refused_by_name(
    offline_helm: Helm, path: tuple[str, ...], empty: dict[str, Any] | list[Any]
) -> None:
    """As of a key that nothing follows: `tolerations:`."""
    monitored = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "PrometheusRule")]
    given = ("--set", "gateway.enabled=true,gateway.existingSecret=a,prometheus.url=http://prometheus")
    given = given if path[0] not in ("gateway", "prometheus") or len(path) > 1 else ()
    name = ".".join(path)
    try:
        made = offline_helm.template(*given, *monitored, "--set-json", f"{name}=null")
    except HelmError as refusal:
        if "schema" in str(refusal) and f"'{path[-1]}'" in str(refusal):
            return
        raise
    if isinstance(empty, list) and "securityContext" not in path:  # an empty map takes no default away
        assert made == offline_helm.template(*given, *monitored, "--set-json", f"{name}=[]")
