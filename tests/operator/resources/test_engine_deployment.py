"""An engine role's pods: flags, volumes, probes, and what does and does not make another revision of them."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import engine_roles
from kvasir_operator.resources.engine_deployment import engine_deployment, engine_pod_template
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()


def pod_template(service: InferenceService, settings: OperatorSettings = SETTINGS, role: int = 0) -> dict[str, Any]:
    return engine_pod_template(service, engine_roles(service, settings.defaults)[role], settings)


def pod_spec(service: InferenceService, settings: OperatorSettings = SETTINGS) -> dict[str, Any]:
    spec: dict[str, Any] = pod_template(service, settings)["spec"]
    return spec


def container(service: InferenceService) -> dict[str, Any]:
    [only] = pod_spec(service)["containers"]
    return dict(only)


def flags(service: InferenceService) -> dict[str, str]:
    return dict(pairwise(container(service)["command"]))


def test_serves_the_mounted_folder_under_the_models_own_name(make_service: MakeService) -> None:
    command = container(make_service(model={"source": "file:///data/m", "name": "big", "aliases": ["b"]}))["command"]

    assert command[:6] == ["kvasir-runtime", "serve", "/models/m", "--served-model-name", "big", "--host"]


def test_flags_follow_the_manifest_and_args_come_last(make_service: MakeService) -> None:
    engine = {"device": "cpu", "dtype": "float32", "maxModelLen": 512, "maxNumSeqs": 4, "memoryUtilization": 0.5}
    engine |= {"maxNumBatchedTokens": 64, "scheduling": "priority", "kvCache": {"blockSize": 8, "prefixCaching": False}}
    service = make_service(engine=engine | {"args": ["--max-n", "4"]}, rollout={"drainTimeout": "2m"})
    seen = flags(service)

    assert (seen["--host"], seen["--port"], seen["--device"], seen["--dtype"]) == ("::", "8000", "cpu", "float32")
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


def test_the_pod_may_drain_before_it_is_killed(make_service: MakeService) -> None:
    assert pod_spec(make_service(rollout={"drainTimeout": "90s"}))["terminationGracePeriodSeconds"] > 90


def test_the_image_is_the_operators_where_the_manifest_names_none(make_service: MakeService) -> None:
    [only] = pod_spec(make_service(), OperatorSettings(runtime_image="r:2", image_pull_policy="Never"))["containers"]

    assert (only["image"], only["imagePullPolicy"]) == ("r:2", "Never")


def test_the_deployment_selects_and_labels_its_role_and_revision(make_service: MakeService) -> None:
    service = make_service(disaggregation={"prefill": {}, "decode": {}})
    [prefill, decode] = (
        engine_deployment(service, role, "0123456789", 3, SETTINGS) for role in engine_roles(service, SETTINGS.defaults)
    )
    labels, selector = prefill["spec"]["template"]["metadata"]["labels"], prefill["spec"]["selector"]["matchLabels"]

    assert prefill["metadata"]["name"] == "llama-prefill-0123456789"
    assert prefill["spec"]["replicas"] == 3
    assert selector.items() <= labels.items()
    assert labels["serving.kvasir.dev/revision"] == prefill["metadata"]["labels"]["serving.kvasir.dev/revision"]
    assert not selector.items() <= decode["spec"]["template"]["metadata"]["labels"].items()


def test_a_role_has_its_own_engine_settings_and_pod_fields(make_service: MakeService) -> None:
    prefill = {"engine": {"maxNumBatchedTokens": 16384, "args": ["--b"]}, "pod": {"priorityClassName": "high"}}
    service = make_service(
        engine={"maxNumBatchedTokens": 2048, "args": ["--a"]},
        pod={"runtimeClassName": "nvidia"},
        disaggregation={"prefill": prefill, "decode": {}},
    )
    templates = [pod_template(service, role=index)["spec"] for index in range(2)]
    seen = [dict(pairwise(template["containers"][0]["command"])) for template in templates]

    assert [flags["--max-num-batched-tokens"] for flags in seen] == ["16384", "2048"]
    assert templates[0]["containers"][0]["command"][-2:] == ["--a", "--b"]
    assert [template.get("priorityClassName") for template in templates] == ["high", None]
    assert {template["runtimeClassName"] for template in templates} == {"nvidia"}


WITHOUT_EFFECT: dict[str, dict[str, Any]] = {
    "aliases": {"model": {"source": "file:///models/llama", "aliases": ["b"]}},
    "adapters": {"engine": {"adapters": {"list": [{"name": "sql", "source": "file:///a"}]}}},
    "monitoring": {"monitoring": {"podMonitor": "none"}},
    "the spelling of a duration": {"rollout": {"drainTimeout": "5m"}},
    "replicas": {"replicas": 7},
    "router": {"router": {"policy": "roundRobin", "pod": {"labels": {"a": "b"}}}},
    "rollout": {"rollout": {"maxSurge": 3, "historyLimit": 0, "canary": {"weight": 5}}},
}


@pytest.mark.parametrize("changed", WITHOUT_EFFECT)
def test_what_shapes_no_engine_pod_is_not_in_its_template(make_service: MakeService, changed: str) -> None:
    assert pod_template(make_service(**WITHOUT_EFFECT[changed])) == pod_template(make_service())


def test_the_template_names_no_revision_as_it_is_what_a_revision_is_made_from(make_service: MakeService) -> None:
    service = make_service()
    [role] = engine_roles(service, SETTINGS.defaults)
    before = engine_pod_template(service, role, SETTINGS)
    engine_deployment(service, role, "0123456789", 1, SETTINGS)

    assert "serving.kvasir.dev/revision" not in before["metadata"]["labels"]
    assert engine_pod_template(service, role, SETTINGS) == before


def test_engines_publish_kv_events_and_load_on_the_ports_that_their_container_names(make_service: MakeService) -> None:
    config = json.loads(flags(make_service())["--kv-events-config"])
    ports = {port["name"]: port["containerPort"] for port in container(make_service())["ports"]}

    assert ports == {"http": 8000, "kv-events": 5557, "kv-replay": 5657}
    assert config == {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
        "load_hz": 20,
    }


def test_each_data_parallel_rank_has_ports_of_its_own_behind_those_that_all_engines_are_told(
    make_service: MakeService,
) -> None:
    service = make_service(parallelism={"data": 2})
    ports = {port["name"]: port["containerPort"] for port in container(service)["ports"]}

    assert flags(service)["--kv-events-config"] == flags(make_service())["--kv-events-config"]
    assert ports == {"http": 8000, "kv-events": 5557, "kv-events-1": 5558, "kv-replay": 5657, "kv-replay-1": 5658}
