"""Models that are downloaded: the loaders of an engine pod, the cache that they fill, and who sees the credentials."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvasir_operator.settings import OperatorSettings

RenderPod = Callable[..., dict[str, Any]]
HUB = {"source": "hf://org/name@v1"}
DRAFT = {"method": "eagle3", "model": "s3://bucket/drafts/small"}


def mount_of(container: dict[str, Any]) -> dict[str, Any]:
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "model-cache"]
    return dict(mount)


def cache_of(spec: dict[str, Any]) -> dict[str, Any]:
    [volume] = [each for each in spec["volumes"] if each["name"] == "model-cache"]
    return {key: value for key, value in volume.items() if key != "name"}


def test_a_loader_fills_the_folder_that_the_engine_reads(engine_template: RenderPod) -> None:
    spec = engine_template(model=HUB)["spec"]
    [loader], [engine] = spec["initContainers"], spec["containers"]

    assert loader["name"] == "model-loader"
    assert loader["command"][:4] == ["kvasir-runtime", "fetch", "hf://org/name@v1", "/model-cache/hf/org/name/v1"]
    assert engine["command"][2] == "/model-cache/hf/org/name/v1"
    assert mount_of(loader) == {"name": "model-cache", "mountPath": "/model-cache"}
    assert mount_of(engine) == {"name": "model-cache", "mountPath": "/model-cache", "readOnly": True}


def test_a_loader_answers_on_the_port_of_the_engine_that_is_not_there_yet(engine_template: RenderPod) -> None:
    spec = engine_template(model=HUB)["spec"]

    assert spec["initContainers"][0]["command"][4:] == ["--host", "::", "--port", "8000"]
    assert {"name": "http", "containerPort": 8000, "protocol": "TCP"} in spec["containers"][0]["ports"]


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("hf://org/name", "hf/org/name/main"),
        ("hf://org/name@refs/pr/1", "hf/org/name/refs%2Fpr%2F1"),
        ("s3://bucket/some/prefix/", "s3/bucket/some%2Fprefix"),
        ("s3://bucket", "s3/bucket/%2F"),
    ],
)
def test_no_models_folder_lies_in_anothers(engine_template: RenderPod, source: str, folder: str) -> None:
    loader = engine_template(model={"source": source})["spec"]["initContainers"][0]

    assert loader["command"][3] == f"/model-cache/{folder}"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {}}),
        ({"sizeLimit": "20Gi"}, {"emptyDir": {"sizeLimit": "20Gi"}}),
        ({"claim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": "/var/models"}, {"hostPath": {"path": "/var/models", "type": "Directory"}}),
    ],
)
def test_the_cache_is_the_manifests(
    engine_template: RenderPod, cache: dict[str, str] | None, volume: dict[str, Any]
) -> None:
    spec = engine_template(model=HUB | ({} if cache is None else {"cache": cache}))["spec"]

    assert cache_of(spec) == volume


def test_the_loader_knows_the_size_that_a_kubelet_would_evict_for(engine_template: RenderPod) -> None:
    loader = engine_template(model=HUB | {"cache": {"sizeLimit": "20Gi"}})["spec"]["initContainers"][0]

    assert loader["command"][-2:] == ["--size-limit", str(20 << 30)]


def test_credentials_are_the_loaders_alone(engine_template: RenderPod) -> None:
    template = engine_template(model=HUB | {"secretRef": {"name": "hf-token"}}, engine={"speculative": DRAFT})
    loaders = template["spec"].pop("initContainers")

    assert [each["envFrom"] for each in loaders] == [[{"secretRef": {"name": "hf-token"}}]] * 2
    assert "hf-token" not in json.dumps([each["command"] + each["env"] for each in loaders])
    assert "hf-token" not in json.dumps(template)


def test_a_model_and_its_draft_share_the_cache_and_each_has_a_loader(engine_template: RenderPod) -> None:
    spec = engine_template(model=HUB, engine={"speculative": DRAFT})["spec"]
    [engine] = spec["containers"]
    config = json.loads(engine["command"][engine["command"].index("--speculative-config") + 1])

    assert [each["name"] for each in spec["initContainers"]] == ["model-loader", "draft-model-loader"]
    assert config["model"] == "/model-cache/s3/bucket/drafts%2Fsmall" == spec["initContainers"][1]["command"][3]
    assert [each["name"] for each in spec["volumes"]].count("model-cache") == 1
    assert mount_of(engine)["readOnly"]


def test_a_draft_alone_is_loaded_beside_a_model_of_a_volume(engine_template: RenderPod) -> None:
    spec = engine_template(model={"source": "pvc://models"}, engine={"speculative": DRAFT})["spec"]

    assert [each["name"] for each in spec["initContainers"]] == ["draft-model-loader"]


@pytest.mark.parametrize("source", ["file:///models/m", "pvc://models", "oci://r.io/m:1"])
def test_a_model_of_a_volume_needs_no_loader(engine_template: RenderPod, source: str) -> None:
    spec = engine_template(model={"source": source})["spec"]

    assert "initContainers" not in spec
    assert "model-cache" not in json.dumps(spec)


def test_a_loader_takes_no_device_and_makes_no_pod_larger(engine_template: RenderPod) -> None:
    resources = {"accelerator": "nvidia.com/gpu", "cpu": "8", "memory": "64Gi", "extra": {"rdma/ib": "1"}}
    loader = engine_template(model=HUB, resources=resources)["spec"]["initContainers"][0]
    amounts = {"cpu": "8", "memory": "64Gi"}

    assert loader["resources"] == {"requests": amounts, "limits": amounts}
    without = engine_template(model=HUB, engine={"device": "cpu"})["spec"]["initContainers"][0]
    assert "resources" not in without


def test_proxies_and_certificates_of_the_pod_are_the_loaders_too(engine_template: RenderPod) -> None:
    pod = {
        "image": "mine:1",
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "volumes": [{"mountPath": "/ca", "configMap": {"name": "ca"}}],
    }
    settings = OperatorSettings(image_pull_policy="Always")
    loader = engine_template(settings, model=HUB, pod=pod)["spec"]["initContainers"][0]

    assert (loader["image"], loader["imagePullPolicy"]) == ("mine:1", "Always")
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in loader["env"]
    assert {"name": "HOME", "value": "/tmp"} in loader["env"]
    assert "/ca" in [mount["mountPath"] for mount in loader["volumeMounts"]]


def test_a_loader_logs_as_the_engine_does(engine_template: RenderPod) -> None:
    loader = engine_template(OperatorSettings(log_format="json"), model=HUB)["spec"]["initContainers"][0]
    assert loader["command"][-2:] == ["--log-format", "json"]


def test_the_secret_of_the_routers_is_not_the_loaders(engine_template: RenderPod) -> None:
    assert "KVASIR_ROUTER_SECRET" not in json.dumps(engine_template(model=HUB)["spec"]["initContainers"])
