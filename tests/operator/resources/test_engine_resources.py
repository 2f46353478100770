"""What an engine pod asks its node for, and the device that its engine is told."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults
from kvasir_operator.api.model import PodSpec, ResourcesSpec
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.settings import OperatorSettings

RenderPod = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {"cpu": "3", "memory": "12Gi", "nvidia.com/gpu": "1"}),
        (
            {"parallelism": {"tensor": 4, "data": 2}},
            {"cpu": "24", "memory": "96Gi", "nvidia.com/gpu": "8"},
        ),
        (
            {"parallelism": {"tensor": 4}, "resources": {"maxDevices": 8}},
            {"cpu": "12", "memory": "48Gi", "nvidia.com/gpu": "4"},
        ),
        (
            {"parallelism": {"tensor": 16, "pipeline": 2}, "resources": {"maxDevices": 8}},
            {"cpu": "24", "memory": "96Gi", "nvidia.com/gpu": "8"},
        ),
        (
            {"parallelism": {"tensor": 2, "pipeline": 2, "data": 4}, "resources": {"maxDevices": 4}},
            {"cpu": "12", "memory": "48Gi", "nvidia.com/gpu": "4"},
        ),
        ({"resources": {"accelerator": "amd.com/gpu"}}, {"cpu": "3", "memory": "12Gi", "amd.com/gpu": "1"}),
        ({"resources": {"cpu": "16", "memory": "99Gi"}}, {"cpu": "16", "memory": "99Gi", "nvidia.com/gpu": "1"}),
        ({"resources": {"cpu": "16"}}, {"cpu": "16", "memory": "12Gi", "nvidia.com/gpu": "1"}),
        ({"resources": {"accelerator": "none", "cpu": "2", "memory": "4Gi"}}, {"cpu": "2", "memory": "4Gi"}),
        (
            {"resources": {"accelerator": "none", "extra": {"rdma/ib": 1, "hugepages-2Mi": "1Gi"}}},
            {"rdma/ib": "1", "hugepages-2Mi": "1Gi"},
        ),
    ],
)
def test_resources_are_requested_and_limited(
    engine_template: RenderPod, spec: dict[str, Any], expected: dict[str, str]
) -> None:
    [container] = engine_template(**spec)["spec"]["containers"]

    assert container["resources"] == {"requests": expected, "limits": expected}


def test_more_cpu_may_be_used_than_is_requested(engine_template: RenderPod) -> None:
    resources = {"accelerator": "none", "cpu": 2, "cpuLimit": 8, "memory": "4Gi"}
    for model in ("pvc://models/m", "hf://org/name"):
        pod = engine_template(resources=resources, model={"source": model})["spec"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["resources"]["requests"] == {"cpu": "2", "memory": "4Gi"}
            assert container["resources"]["limits"] == {"cpu": "8", "memory": "4Gi"}


def test_no_more_cpu_is_requested_than_may_be_used(engine_template: RenderPod) -> None:
    [container] = engine_template(resources={"cpuLimit": 2})["spec"]["containers"]
    assert (container["resources"]["requests"]["cpu"], container["resources"]["limits"]["cpu"]) == ("2", "2")


@pytest.mark.parametrize("spec", [{"engine": {"device": "cpu"}}, {"resources": {"accelerator": "none"}}])
def test_without_an_accelerator_nothing_is_asked_for_that_the_manifest_does_not(
    engine_template: RenderPod, spec: dict[str, Any]
) -> None:
    assert engine_template(**spec)["spec"]["containers"][0]["resources"] == {}


@pytest.mark.parametrize(
    ("spec", "device"),
    [
        ({}, "cuda"),
        ({"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}}, "cuda"),
        ({"engine": {"device": "cuda"}, "resources": {"accelerator": "nvidia.com/gpu"}}, "cuda"),
        ({"engine": {"device": "cuda"}, "resources": {"accelerator": "vendor.example/gpu"}}, "cuda"),
        ({"resources": {"accelerator": "amd.com/gpu"}}, "auto"),
        ({"resources": {"accelerator": "example.com/nvidia.com"}}, "auto"),
        ({"resources": {"accelerator": "none"}}, "auto"),
        ({"engine": {"device": "cpu"}}, "cpu"),
    ],
)
def test_an_engine_with_a_device_of_nvidias_must_use_it(
    engine_template: RenderPod, spec: dict[str, Any], device: str
) -> None:
    [container] = engine_template(**spec)["spec"]["containers"]

    assert dict(pairwise(container["command"]))["--device"] == device


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ({}, None),
        ({"parallelism": {"data": 2}}, None),
        ({"parallelism": {"tensor": 2}}, "2Gi"),
        ({"parallelism": {"tensor": 8}}, "8Gi"),
        ({"parallelism": {"tensor": 8}, "resources": {"maxDevices": 4}}, "4Gi"),
        ({"parallelism": {"tensor": 8}, "resources": {"maxDevices": 1}}, None),
        ({"resources": {"sharedMemory": "5Gi"}}, "5Gi"),
        ({"parallelism": {"tensor": 8}, "resources": {"sharedMemory": "5Gi"}}, "5Gi"),
    ],
)
def test_shared_memory_grows_with_the_tensor_ranks_of_a_pod(
    engine_template: RenderPod, spec: dict[str, Any], size: str | None
) -> None:
    pod = engine_template(**spec)["spec"]
    sizes = [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    mounts = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/dev/shm"]

    assert sizes == [size] * len(mounts)
    assert bool(mounts) == (size is not None)


def test_claims_of_dynamic_resource_allocation_are_passed_through(engine_template: RenderPod) -> None:
    claims = [
        {"name": "gpu", "resourceClaimTemplateName": "one-gpu"},
        {"name": "nic", "resourceClaimName": "shared-nic"},
    ]
    pod = engine_template(resources={"accelerator": "none", "claims": claims})["spec"]

    assert pod["resourceClaims"] == claims
    assert pod["containers"][0]["resources"] == {"claims": [{"name": "gpu"}, {"name": "nic"}]}
    assert "resourceClaims" not in engine_template()["spec"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_what_a_claim_gives_is_not_guessed(engine_template: RenderPod, device: str) -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    pod = engine_template(engine={"device": device}, resources={"accelerator": "none", "claims": claims})["spec"]

    assert dict(pairwise(pod["containers"][0]["command"]))["--device"] == device


def test_an_engine_on_cpus_holds_no_accelerator_that_a_profile_names(engine_template: RenderPod) -> None:
    profile = PodDefaults(resources=ResourcesSpec(accelerator="nvidia.com/gpu"))
    settings = OperatorSettings(defaults=InstallationDefaults(engine=profile, profiles={"gpu": profile}))

    for resources in ({}, {"profile": "gpu"}):
        pod = engine_template(settings, engine={"device": "cpu"}, resources=resources)["spec"]
        assert pod["containers"][0]["resources"] == {}


def test_a_profile_shapes_the_pods_of_a_service_that_names_it(engine_template: RenderPod) -> None:
    profile = PodDefaults(
        PodSpec(image="h100:1", node_selector={"pool": "h100"}, runtime_class_name="nvidia"),
        ResourcesSpec(cpu=Quantity("20"), memory=Quantity("200Gi"), extra={"rdma/ib": Quantity("1")}),
    )
    settings = OperatorSettings(defaults=InstallationDefaults(profiles={"h100": profile}))
    pod = engine_template(settings, resources={"profile": "h100", "cpu": "24"})["spec"]
    [container] = pod["containers"]

    assert (container["image"], pod["runtimeClassName"], pod["nodeSelector"]["pool"]) == ("h100:1", "nvidia", "h100")
    expected = {"cpu": "24", "memory": "200Gi", "nvidia.com/gpu": "1", "rdma/ib": "1"}
    assert container["resources"]["limits"] == expected
    assert engine_template(settings)["spec"]["containers"][0]["image"] != "h100:1"
