"""The engine's Deployment: flags, volumes, resources, probes, overrides."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.engine_deployment import engine_deployment
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]


def pod_spec(service: InferenceService, settings: OperatorSettings | None = None) -> dict[str, Any]:
    deployment = engine_deployment(service, settings or OperatorSettings(), "0123456789")
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container(service: InferenceService) -> dict[str, Any]:
    [only] = pod_spec(service)["containers"]
    return dict(only)


def flags(service: InferenceService) -> dict[str, str]:
    return dict(pairwise(container(service)["command"]))


def test_serves_the_mounted_folder_under_the_models_names(make_service: MakeService) -> None:
    command = container(make_service(model={"source": "file:///data/m", "name": "big", "aliases": ["b"]}))["command"]

    assert command[:6] == ["kvasir-runtime", "serve", "/models/m", "--served-model-name", "big", "b"]


def test_flags_follow_the_manifest_and_args_come_last(make_service: MakeService) -> None:
    engine = {"device": "cpu", "dtype": "float32", "maxModelLen": 512, "maxNumSeqs": 4, "memoryUtilization": 0.5}
    engine |= {"maxNumBatchedTokens": 64, "scheduling": "priority", "kvCache": {"blockSize": 8, "prefixCaching": False}}
    service = make_service(engine=engine | {"args": ["--max-n", "4"]}, rollout={"drainTimeout": "2m"})
    seen = flags(service)

    assert (seen["--host"], seen["--port"], seen["--device"], seen["--dtype"]) == ("0.0.0.0", "8000", "cpu", "float32")
    assert (seen["--max-model-len"], seen["--max-num-seqs"], seen["--max-num-batched-tokens"]) == ("512", "4", "64")
    assert (seen["--gpu-memory-utilization"], seen["--scheduling-policy"]) == ("0.5", "priority")
    assert (seen["--block-size"], seen["--shutdown-timeout"]) == ("8", "120")
    assert "--no-enable-prefix-caching" in seen
    assert container(service)["command"][-2:] == ["--max-n", "4"]


def test_what_the_engine_decides_by_device_is_not_passed(make_service: MakeService) -> None:
    seen = flags(make_service())

    assert not {"--max-model-len", "--max-num-batched-tokens", "--gpu-memory-utilization"} & seen.keys()


@pytest.mark.parametrize(
    ("source", "location", "volume"),
    [
        ("file:///data/m", "/models/m", {"hostPath": {"path": "/data/m", "type": "Directory"}}),
        ("pvc://claim", "/models/claim", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("pvc://claim/a/b", "/models/claim/a/b", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("oci://r.io/m:1", "/models/image", {"image": {"reference": "r.io/m:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_a_source_becomes_a_read_only_volume(
    make_service: MakeService, source: str, location: str, volume: dict[str, Any]
) -> None:
    service = make_service(model={"source": source})
    [mount] = [m for m in container(service)["volumeMounts"] if m["name"] == "model"]

    assert container(service)["command"][2] == location
    assert {"name": "model", **volume} in pod_spec(service)["volumes"]
    assert mount["readOnly"]
    assert location.startswith(mount["mountPath"])


def test_a_source_without_a_volume_is_handed_to_the_engine_as_it_is(make_service: MakeService) -> None:
    service = make_service(model={"source": "hf://org/name@v1"})

    assert container(service)["command"][2] == "hf://org/name@v1"
    assert [volume["name"] for volume in pod_spec(service)["volumes"]] == ["tmp"]


@pytest.mark.parametrize(
    ("speculative", "config"),
    [
        ({"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 4}),
        ({"method": "suffix", "numTokens": 8}, {"method": "suffix", "num_speculative_tokens": 8}),
        *(
            (
                {"method": written, "model": "file:///data/d", "numTokens": 1},
                {"method": flag, "model": "/draft-models/d", "num_speculative_tokens": 1},
            )
            for written, flag in (
                ("draftModel", "draft_model"),
                ("medusa", "medusa"),
                ("eagle", "eagle"),
                ("eagle3", "eagle3"),
            )
        ),
    ],
)
def test_speculation_becomes_a_flag(
    make_service: MakeService, speculative: dict[str, Any], config: dict[str, Any]
) -> None:
    assert json.loads(flags(make_service(engine={"speculative": speculative}))["--speculative-config"]) == config


def test_nothing_is_said_of_speculation_where_the_manifest_does_not_ask_for_it(make_service: MakeService) -> None:
    assert "--speculative-config" not in container(make_service())["command"]


@pytest.mark.parametrize(
    ("source", "location", "volume"),
    [
        ("file:///drafts/m", "/draft-models/m", {"hostPath": {"path": "/drafts/m", "type": "Directory"}}),
        ("pvc://claim/d", "/draft-models/claim/d", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("oci://r.io/d:1", "/draft-models/image", {"image": {"reference": "r.io/d:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_a_draft_model_is_mounted_beside_its_target_even_under_the_same_name(
    make_service: MakeService, source: str, location: str, volume: dict[str, Any]
) -> None:
    service = make_service(
        model={"source": "file:///data/m"}, engine={"speculative": {"method": "draftModel", "model": source}}
    )
    mounts = {mount["name"]: mount for mount in container(service)["volumeMounts"]}

    assert json.loads(flags(service)["--speculative-config"])["model"] == location
    assert {"name": "draft-model", **volume} in pod_spec(service)["volumes"]
    assert mounts["draft-model"]["readOnly"]
    assert location.startswith(mounts["draft-model"]["mountPath"])
    assert mounts["model"]["mountPath"] == "/models/m"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {"nvidia.com/gpu": "1"}),
        ({"engine": {"device": "cpu"}}, None),
        ({"resources": {"accelerator": "none", "cpu": "2", "memory": "4Gi"}}, {"cpu": "2", "memory": "4Gi"}),
        ({"parallelism": {"tensor": 4, "data": 2, "pipeline": 2}}, {"nvidia.com/gpu": "8"}),
        ({"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}}, {"nvidia.com/mig-1g.10gb": "1"}),
    ],
)
def test_resources_are_requested_and_limited(
    make_service: MakeService, spec: dict[str, Any], expected: dict[str, str] | None
) -> None:
    resources = container(make_service(**spec))["resources"]

    assert resources == ({} if expected is None else {"requests": expected, "limits": expected})


def test_shared_memory_is_mounted_where_its_size_is_given(make_service: MakeService) -> None:
    service = make_service(resources={"sharedMemory": "2Gi"})
    volume = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}

    assert volume in pod_spec(service)["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container(service)["volumeMounts"]


def test_probes_ask_for_readiness_until_the_start_is_over_then_for_progress(make_service: MakeService) -> None:
    probes = container(make_service())

    assert probes["startupProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert probes["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert probes["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http"}


def test_an_engine_that_hangs_is_found_soon_and_not_given_the_time_to_drain(make_service: MakeService) -> None:
    probe = container(make_service(rollout={"drainTimeout": "300s"}))["livenessProbe"]

    assert probe["failureThreshold"] * probe["periodSeconds"] + probe["timeoutSeconds"] <= 20
    assert probe["terminationGracePeriodSeconds"] <= 10


def test_an_engine_leaves_its_last_words(make_service: MakeService) -> None:
    assert container(make_service())["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_images_are_pulled_with_the_operators_secrets(make_service: MakeService) -> None:
    settings = OperatorSettings(image_pull_secret=("mirror", "hub"))

    assert pod_spec(make_service(), settings)["imagePullSecrets"] == [{"name": "mirror"}, {"name": "hub"}]
    assert "imagePullSecrets" not in pod_spec(make_service())  # those of its ServiceAccount then hold


def test_the_pod_may_drain_before_it_is_killed(make_service: MakeService) -> None:
    assert pod_spec(make_service(rollout={"drainTimeout": "90s"}))["terminationGracePeriodSeconds"] > 90


def test_the_sandbox_is_closed(make_service: MakeService) -> None:
    pod = pod_spec(make_service())
    context = pod["containers"][0]["securityContext"]

    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert {"name": "tmp", "mountPath": "/tmp"} in pod["containers"][0]["volumeMounts"]


def test_pod_overrides_are_merged(make_service: MakeService) -> None:
    overrides = {
        "image": "mine:1",
        "nodeSelector": {"gpu": "l4"},
        "tolerations": [{"key": "gpu"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "env": [{"name": "HOME", "value": "/home/me"}, {"name": "A", "value": "1"}],
    }
    pod = pod_spec(make_service(pod=overrides))

    assert pod["containers"][0]["image"] == "mine:1"
    assert overrides["env"] == [each for each in pod["containers"][0]["env"] if each["name"] != "KVASIR_ROUTER_SECRET"]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Equal"}]
    assert {key: pod[key] for key in ("nodeSelector", "affinity", "priorityClassName")} == {
        key: overrides[key] for key in ("nodeSelector", "affinity", "priorityClassName")
    }


def test_labels_of_the_manifest_cannot_hide_our_own(make_service: MakeService) -> None:
    service = make_service(pod={"labels": {"team": "search", "app.kubernetes.io/managed-by": "me"}})
    labels = engine_deployment(service, OperatorSettings(), "0123456789")["spec"]["template"]["metadata"]["labels"]

    assert labels["team"] == "search"
    assert labels["app.kubernetes.io/managed-by"] == "kvasir-operator"


def test_pods_are_spread_unless_told_otherwise(make_service: MakeService) -> None:
    spread = pod_spec(make_service())["topologySpreadConstraints"]

    assert [c["topologyKey"] for c in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert {c["whenUnsatisfiable"] for c in spread} == {"ScheduleAnyway"}
    assert "topologySpreadConstraints" not in pod_spec(make_service(pod={"topologySpread": "none"}))


def test_the_image_is_the_operators_where_the_manifest_names_none(make_service: MakeService) -> None:
    [only] = pod_spec(make_service(), OperatorSettings(runtime_image="r:2", image_pull_policy="Never"))["containers"]

    assert (only["image"], only["imagePullPolicy"]) == ("r:2", "Never")


def test_rollout_and_replicas_go_into_the_deployment(make_service: MakeService) -> None:
    service = make_service(replicas=3, rollout={"maxSurge": "25%", "maxUnavailable": 1})
    spec = engine_deployment(service, OperatorSettings(), "0123456789")["spec"]

    assert spec["replicas"] == 3
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 1}


def test_an_autoscaled_service_starts_with_its_least_replicas_but_never_none(make_service: MakeService) -> None:
    replicas = [
        engine_deployment(make_service(autoscaling={"minReplicas": n, "maxReplicas": 8}), OperatorSettings(), "r")
        for n in (0, 3)
    ]

    assert [deployment["spec"]["replicas"] for deployment in replicas] == [1, 3]
