"""Rendered pods pass Pod Security's `restricted` level, whoever chooses the ids (OpenShift: restricted-v2)."""

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults, RouterDefaults
from kvasir_operator.api.model import PodSpec
from kvasir_operator.settings import OperatorSettings

RenderPod = Callable[..., dict[str, Any]]
IDS = ("runAsUser", "runAsGroup", "fsGroup")
COMBINATIONS = list(chain.from_iterable(combinations(IDS, number) for number in range(len(IDS) + 1)))
FILES = [{"mountPath": "/ca", "configMap": {"name": "ca"}}, {"mountPath": "/s", "secret": {"name": "s"}}]
# https://kubernetes.io/docs/concepts/security/pod-security-standards/, `restricted` and, within it, `baseline`.
VOLUME_TYPES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"}
VOLUME_TYPES |= {"projected", "secret"}
SECCOMP_TYPES = ("RuntimeDefault", "Localhost")


def violations(pod: dict[str, Any]) -> list[str]:
    """What of a pod spec the `restricted` level refuses."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [f"volume {v['name']}" for v in pod["volumes"] if not set(v) - {"name"} <= VOLUME_TYPES]
    context = pod.get("securityContext", {})
    found += [f"pod {key}" for key in ("sysctls", "seLinuxOptions", "windowsOptions") if context.get(key)]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        found += container_violations(context, container)
    return found


def container_violations(pod_context: dict[str, Any], container: dict[str, Any]) -> list[str]:
    own = container["securityContext"]
    both = {**pod_context, **own}
    capabilities = own.get("capabilities", {})
    checks = {
        "privileged": not own.get("privileged"),
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "runAsNonRoot": both.get("runAsNonRoot") is True,
        "runAsUser": both.get("runAsUser") != 0,
        "seccompProfile": both.get("seccompProfile", {}).get("type") in SECCOMP_TYPES,
        "capabilities.drop": "ALL" in capabilities.get("drop", []),
        "capabilities.add": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
        "procMount": own.get("procMount", "Default") == "Default",
        "hostPort": not any(port.get("hostPort") for port in container.get("ports", ())),
    }
    return [f"{container['name']} {name}" for name, holds in checks.items() if not holds]


def given_ids(pod: dict[str, Any]) -> set[str]:
    containers = (*pod.get("initContainers", ()), *pod["containers"])
    contexts = [pod.get("securityContext", {}), *(container["securityContext"] for container in containers)]
    return {key for context in contexts for key in context if key in IDS}


def defaults(security_context: dict[str, Any]) -> OperatorSettings:
    """An installation with this security context for all pods."""
    pods = PodSpec(security_context=security_context)
    return OperatorSettings(defaults=InstallationDefaults(engine=PodDefaults(pods), router=RouterDefaults(pods)))


@pytest.mark.parametrize("left_out", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
@pytest.mark.parametrize("named", COMBINATIONS, ids=lambda names: "+".join(names) or "none")
def test_pods_are_restricted_whichever_ids_are_named_and_left_out_again(
    template: RenderPod, named: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    settings = defaults(dict.fromkeys(named, 1000))
    pod = template(settings, pod={"volumes": FILES, "securityContext": dict.fromkeys(left_out)})["spec"]

    assert violations({**pod, "volumes": without_host_path(pod)}) == []
    assert given_ids(pod) == set(named) - set(left_out)


def without_host_path(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """The model of these tests' manifest is file://, which `restricted` forbids and its author asked for."""
    return [volume for volume in pod["volumes"] if "hostPath" not in volume]


@pytest.mark.parametrize("source", ["pvc://models/m", "oci://registry.example/m:1", "hf://org/name"])
def test_an_engine_with_a_model_of_the_clusters_is_restricted(engine_template: RenderPod, source: str) -> None:
    resources = {"sharedMemory": "1Gi"}
    speculative = {"method": "draftModel", "model": source}
    pod = engine_template(model={"source": source}, engine={"speculative": speculative}, resources=resources)

    assert violations(pod["spec"]) == []


def test_ids_are_the_images_or_the_platforms_unless_somebody_names_them(template: RenderPod) -> None:
    assert given_ids(template()["spec"]) == set()
    assert template(pod={"securityContext": {"runAsUser": 7}})["spec"]["securityContext"]["runAsUser"] == 7


def test_a_loader_has_the_ids_of_its_pod_and_none_of_its_own(engine_template: RenderPod) -> None:
    named = engine_template(defaults(dict.fromkeys(IDS, 1000)), model={"source": "hf://org/name"})["spec"]
    left_out = engine_template(model={"source": "hf://org/name"})["spec"]

    assert [container["name"] for container in named["initContainers"]] == ["model-loader"]
    assert {key: named["securityContext"][key] for key in IDS} == dict.fromkeys(IDS, 1000)
    assert not named["initContainers"][0]["securityContext"].keys() & set(IDS)
    assert given_ids(left_out) == set()


def test_each_field_goes_to_the_context_that_has_it(template: RenderPod) -> None:
    of_the_pod = {"fsGroupChangePolicy": "OnRootMismatch", "supplementalGroups": [5], "runAsUser": 7}
    of_the_pod |= {"seLinuxOptions": {"level": "s0"}, "appArmorProfile": {"type": "RuntimeDefault"}}
    of_the_container = {"privileged": True, "procMount": "Default", "readOnlyRootFilesystem": False}
    pod = template(pod={"securityContext": of_the_pod | of_the_container})["spec"]
    context, own = pod["securityContext"], pod["containers"][0]["securityContext"]

    assert of_the_pod.items() <= context.items()
    assert of_the_container.items() <= own.items()
    assert not own.keys() & of_the_pod.keys()
    assert not context.keys() & of_the_container.keys()


def test_what_is_said_is_merged_into_ours_and_not_put_in_its_place(template: RenderPod) -> None:
    said = {
        "capabilities": {"add": ["IPC_LOCK"]},
        "seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"},
    }
    pod = template(pod={"securityContext": said})["spec"]

    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert pod["securityContext"]["seccompProfile"] == {"type": "Localhost", "localhostProfile": "p.json"}


def test_the_manifest_wins_over_the_installation(template: RenderPod) -> None:
    pod = template(defaults({"runAsUser": 3, "fsGroup": 3}), pod={"securityContext": {"fsGroup": 4}})["spec"]

    assert (pod["securityContext"]["fsGroup"], pod["securityContext"]["runAsUser"]) == (4, 3)


def test_the_root_file_system_is_read_only_and_tmp_is_not(template: RenderPod) -> None:
    [container] = template()["spec"]["containers"]

    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    assert {"name": "HOME", "value": "/tmp"} in container["env"]
