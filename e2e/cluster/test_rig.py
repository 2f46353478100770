"""What the rig decides without a cluster: how images are named, which monitors become what, which cgroups get what."""

import json
import tarfile
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.cluster.rig import template
from e2e.cluster.rig.archives import key, read_archive
from e2e.cluster.rig.cache import made_once
from e2e.cluster.rig.cgroups import enable_controllers
from e2e.cluster.rig.discovery import target_groups
from e2e.cluster.rig.dns import IMAGE
from e2e.cluster.rig.image import write_image
from e2e.cluster.rig.layout import Node
from e2e.cluster.rig.network import IPV4, IPV6, NETWORKS, Network
from e2e.cluster.rig.oci_archive import pack, write_blob
from e2e.cluster.rig.scraping import UntranslatedError, prometheus_config, rule_files, scrape_configs
from e2e.helm.helm import Helm, helm_program

from kvasir_operator.api.parse import parse_service
from kvasir_operator.desired.objects import desired_service
from kvasir_operator.settings import OperatorSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "kvasir.dev/thing:1"


def monitor(endpoint: dict[str, Any], **spec: Any) -> dict[str, Any]:
    spec = {"selector": {"matchLabels": {"app.kubernetes.io/name": "a.b"}}, "podMetricsEndpoints": [endpoint]} | spec
    return {"metadata": {"namespace": "ns", "name": "m"}, "spec": spec}


def relabelings(config: dict[str, Any], action: str) -> dict[str, str]:
    """Regex by source."""
    return {
        each["source_labels"][0]: each["regex"] for each in config["relabel_configs"] if each.get("action") == action
    }


def test_an_archive_tells_its_image_and_equal_content_has_an_equal_digest(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar"):
        write_image(tmp_path / name, NAME, {"program": b"same"}, ["/program"])
    first, second = read_archive(tmp_path / "a.tar"), read_archive(tmp_path / "b.tar")
    assert list(first.images) == [NAME]
    assert key([first]) == key([second])
    write_image(tmp_path / "b.tar", NAME, {"program": b"other"}, ["/program"])
    assert key([first]) != key([read_archive(tmp_path / "b.tar")])


def test_an_archive_without_a_full_name_is_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "a.tar", "thing", {}, ["/program"])
    with pytest.raises(SystemExit, match=r"REGISTRY/IMAGE:TAG"):
        read_archive(tmp_path / "a.tar")


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    with pytest.raises(SystemExit, match=r"a\.tar is no OCI image archive"):
        read_archive(tmp_path / "a.tar")


def test_a_relabelled_image_is_another_of_the_same_layers(tmp_path: Path) -> None:
    layout, layer = tmp_path / "layout", {"digest": "sha256:" + "0" * 64, "size": 1}
    (layout / "blobs" / "sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text("{}")
    (layout / "blobs" / "sha256" / ("0" * 64)).write_text("x")
    config = write_blob(layout, {"config": {"Labels": {"a": "1"}}})
    manifest = {"mediaType": "manifest", **write_blob(layout, {"config": config, "layers": [layer]})}
    described = manifest | {"annotations": {"org.opencontainers.image.ref.name": "1"}}
    (layout / "index.json").write_text(json.dumps({"manifests": [described]}))
    pack(layout, "1", "kvasir.dev/some:1", tmp_path / "some.tar", {"kvasir.dev/some:2": {"a": "2"}})
    images = read_archive(tmp_path / "some.tar").images
    assert set(images) == {"kvasir.dev/some:1", "kvasir.dev/some:2"}
    with tarfile.open(tmp_path / "some.tar") as tar:
        first, second = (blob_of(tar, images[f"kvasir.dev/some:{number}"]) for number in (1, 2))
        assert first["layers"] == second["layers"] == [layer]
        assert [blob_of(tar, each["config"]["digest"])["config"]["Labels"] for each in (first, second)] == [
            {"a": "1"},
            {"a": "2"},
        ]


def blob_of(tar: tarfile.TarFile, digest: str) -> dict[str, Any]:
    """Of JSON."""
    content = tar.extractfile(f"blobs/sha256/{digest.removeprefix('sha256:')}")
    assert content is not None
    return dict(json.load(content))


def test_a_nodes_root_links_to_what_is_large_and_copies_the_rest(tmp_path: Path) -> None:
    blobs, snapshots = (tmp_path / "template" / place for place in template.LINKED)
    (snapshots / "1" / "fs").mkdir(parents=True)
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("layer")
    (snapshots.parent / "metadata.db").write_text("database")
    root = tmp_path / "node"
    template.link_root(tmp_path / "template", root)
    assert (root / template.LINKED[0] / "abc").readlink() == blobs / "abc"
    assert (root / template.LINKED[1] / "1").readlink() == snapshots / "1"
    database = root / snapshots.parent.name / "metadata.db"
    database.write_text("written by the node")
    assert (snapshots.parent / "metadata.db").read_text() == "database"


def test_what_is_made_once_is_whole_or_not_there(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "part").touch()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        made_once(tmp_path / "thing", fails)
    assert not (tmp_path / "thing").exists()
    assert (made_once(tmp_path / "thing", lambda folder: (folder / "all").touch()) / "all").exists()
    made_once(tmp_path / "thing", fails)  # not called again


def test_controllers_of_version_2_are_enabled_where_they_are_missing(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids rdma\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert enable_controllers(tmp_path) == ["cpuset", "cpu", "pids"]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpuset +cpu +pids"


def test_a_monitor_selects_pods_by_labels_and_port_in_its_own_namespace() -> None:
    [config] = scrape_configs(monitor({"port": "http", "path": "/m", "interval": "9s"}), "file")
    assert (config["metrics_path"], config["scrape_interval"]) == ("/m", "9s")
    keep = relabelings(config, "keep")
    assert keep["__meta_kubernetes_namespace"] == "(ns)"
    assert keep["__meta_kubernetes_pod_label_app_kubernetes_io_name"] == r"a\.b"
    assert keep["__meta_kubernetes_pod_container_port_name"] == "http"


@pytest.mark.parametrize(
    ("operator", "action", "source", "regex"),
    [
        ("In", "keep", "label_k", "(a|b)"),
        ("NotIn", "drop", "label_k", "(a|b)"),
        ("Exists", "keep", "labelpresent_k", "true"),
        ("DoesNotExist", "drop", "labelpresent_k", "true"),
    ],
)
def test_expressions_keep_or_drop(operator: str, action: str, source: str, regex: str) -> None:
    selector = {"matchExpressions": [{"key": "k", "operator": operator, "values": ["a", "b"]}]}
    [config] = scrape_configs(monitor({"port": "http"}, selector=selector), "file")
    assert relabelings(config, action)[f"__meta_kubernetes_pod_{source}"] == regex


@pytest.mark.parametrize(
    ("selector", "regex"), [({"any": True}, None), ({"matchNames": ["a", "b"]}, "(a|b)"), ({}, "(ns)")]
)
def test_a_monitor_looks_into_the_namespaces_that_it_names(selector: dict[str, Any], regex: str | None) -> None:
    [config] = scrape_configs(monitor({"port": "http"}, namespaceSelector=selector), "file")
    assert relabelings(config, "keep").get("__meta_kubernetes_namespace") == regex


def test_every_port_of_a_pod_with_an_address_is_a_target() -> None:
    ports = [{"name": "http", "containerPort": 80}, {"containerPort": 81}]
    pod = {
        "metadata": {"namespace": "ns", "name": "p", "uid": "u", "labels": {"a.b/c": "d"}},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": ports}, {"name": "without"}]},
        "status": {"podIP": "10.0.0.1", "phase": "Running"},
    }
    waiting = pod | {"status": {"phase": "Pending"}}
    named, unnamed = target_groups([pod, waiting])
    assert named["targets"] == ["10.0.0.1:80"]
    assert named["labels"]["__meta_kubernetes_pod_label_a_b_c"] == "d"
    assert named["labels"]["__meta_kubernetes_pod_labelpresent_a_b_c"] == "true"
    assert unnamed["labels"]["__meta_kubernetes_pod_container_port_name"] == ""


def test_relabelings_of_a_monitor_come_last_in_prometheus_own_spelling() -> None:
    relabeling = {"sourceLabels": ["x"], "targetLabel": "y", "action": "Replace"}
    [config] = scrape_configs(monitor({"port": "http", "relabelings": [relabeling]}), "file")
    assert config["relabel_configs"][-1] == {"source_labels": ["x"], "target_label": "y", "action": "replace"}


def test_what_is_not_translated_is_refused_by_name() -> None:
    with pytest.raises(UntranslatedError, match="bearerTokenSecret"):
        scrape_configs(monitor({"port": "http", "bearerTokenSecret": {}}), "file")


def test_rules_of_different_objects_lie_in_different_files() -> None:
    groups = [{"name": "g", "rules": []}]
    rules = [{"metadata": {"namespace": ns, "name": "r"}, "spec": {"groups": groups}} for ns in ("a", "b")]
    assert rule_files(rules) == {"a.r.json": {"groups": groups}, "b.r.json": {"groups": groups}}


def test_without_monitors_nothing_is_scraped() -> None:
    config = prometheus_config([], "file", "rules/*.json")
    assert config["scrape_configs"] == []
    assert json.dumps(config)


def test_every_monitor_of_chart_and_operator_is_translated(tmp_path: Path) -> None:
    helm = Helm(helm_program(), tmp_path)
    service = parse_service(yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text()))
    objects = [
        *helm.template("--api-versions=monitoring.coreos.com/v1/PodMonitor"),
        *desired_service(service, OperatorSettings(), with_pod_monitors=True).shared,
    ]
    monitors = [each for each in objects if each["kind"] == "PodMonitor"]
    config = prometheus_config(monitors, "file", "rules/*.json")
    ports = [
        relabelings(each, "keep")["__meta_kubernetes_pod_container_port_name"] for each in config["scrape_configs"]
    ]
    assert sorted(ports) == ["admin", "http", "metrics"]


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_coredns_has_the_address_that_kubelets_tell_their_pods(network: Network) -> None:
    manifest = (Path(__file__).parent / "manifests" / "coredns.yaml").read_text()
    objects = list(yaml.safe_load_all(network.fill_in(manifest)))
    [service] = [each for each in objects if each["kind"] == "Service"]
    [deployment] = [each for each in objects if each["kind"] == "Deployment"]
    assert service["spec"]["clusterIP"] == network.dns
    assert ip_address(network.dns) in ip_network(network.services)
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE


def test_a_node_has_an_address_and_a_part_of_the_pods_network_in_either_family() -> None:
    assert (IPV4.node(Node(2)), IPV4.pods_of(Node(2))) == ("10.199.0.12", "10.244.2.0/24")
    assert (IPV6.node(Node(2)), IPV6.pods_of(Node(2))) == ("fd00:199::c", "fd00:244:0:2::/64")
    assert (IPV4.api_server, IPV6.api_server) == ("https://10.199.0.1:6443", "https://[fd00:199::1]:6443")


def test_a_target_with_an_ipv6_address_has_brackets() -> None:
    container = {"name": "engine", "ports": [{"containerPort": 8000}]}
    metadata = {"namespace": "n", "name": "pod", "uid": "1"}
    pod = {
        "metadata": metadata,
        "spec": {"containers": [container]},
        "status": {"podIP": "fd00::1", "phase": "Running"},
    }
    [group] = target_groups([pod])
    assert group["targets"] == ["[fd00::1]:8000"]
