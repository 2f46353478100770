"""Manifests through the one door: defaults are filled, and what the CRD refuses is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import models

from kvasir_operator.api.model import EngineSpec, InferenceService, RouterSpec, ScalingPolicy, ScalingRules
from kvasir_operator.api.parse import parse_service
from kvasir_operator.api.quantity import Quantity
from kvasir_operator.api.rules import RESERVED_ARGS
from kvasir_operator.errors import InvalidManifestError

MakeManifest = Callable[..., dict[str, Any]]
MakeService = Callable[..., InferenceService]
SCALARS = {"str": "a", "int": 1, "bool": True}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SPLIT: dict[str, Any] = {"prefill": {}, "decode": {}}


def test_the_smallest_manifest_gets_every_default(make_service: MakeService) -> None:
    service = make_service()

    assert service.model_names == ("llama",)
    assert service.spec.engine == EngineSpec()
    assert service.spec.router == RouterSpec()
    assert (service.namespace, service.name, service.uid) == ("models", "llama", None)


def test_a_manifest_without_a_namespace_is_in_default(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    del manifest["metadata"]["namespace"]

    assert parse_service(manifest).namespace == "default"


def test_what_the_api_server_adds_is_kept(make_service: MakeService) -> None:
    assert make_service(uid="1-2").uid == "1-2"


def test_the_name_and_its_aliases_are_what_clients_use(make_service: MakeService) -> None:
    service = make_service(model={"source": "file:///m", "name": "big", "aliases": ["b", "c"]})

    assert service.model_names == ("big", "b", "c")


def test_camel_case_becomes_snake_case_and_irregular_keys_are_known(make_service: MakeService) -> None:
    service = make_service(
        engine={"kvCache": {"hostMemory": "8Gi"}, "adapters": {"list": [{"name": "sql", "source": "file:///a"}]}},
        autoscaling={"maxReplicas": 3, "targetKVCacheUsage": 0.5},
    )

    assert service.spec.engine.kv_cache.host_memory == Quantity("8Gi")
    assert service.spec.engine.adapters is not None
    assert service.spec.engine.adapters.items[0].name == "sql"
    assert service.spec.autoscaling is not None
    assert service.spec.autoscaling.target_kv_cache_usage == 0.5


def test_a_quantity_may_be_a_number_and_a_whole_float_is_a_whole_number(make_service: MakeService) -> None:
    service = make_service(resources={"cpu": 8}, replicas=2.0)

    assert service.spec.resources is not None
    assert service.spec.resources.cpu == Quantity("8")
    assert service.spec.replicas == 2


def test_empty_text_means_absent_where_any_text_may_stand(make_service: MakeService) -> None:
    assert make_service(pod={"image": "", "priorityClassName": ""}).spec.pod.image is None


# Each refused spec, the path that must be named, and a part of the message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"engine": {"kvcache": {}}}, "spec.engine.kvcache", "unknown field, expected one of adapters"),
    ({"enginee": {}}, "spec.enginee", "unknown field"),
    ({"model": {}}, "spec.model.source", "missing"),
    ({"model": {"source": "http://x"}}, "spec.model.source", "write hf://ORG/NAME"),
    ({"model": {"source": "file:///a/../b"}}, "spec.model.source", "without .."),
    ({"model": {"source": "file:///a", "name": "a b"}}, "spec.model.name", "'a b'"),
    ({"model": {"source": "file:///a", "name": "x" * 129}}, "spec.model.name", "129 characters"),
    ({"model": {"source": "file:///a", "aliases": ["b", "b"]}}, "spec.model.aliases[1]", "twice"),
    ({"model": {"source": "file:///a", "cache": {}}}, "spec.model.cache", "exactly one of claim"),
    ({"engine": "fast"}, "spec.engine", "str 'fast', expected a mapping"),
    ({"engine": {"device": "tpu"}}, "spec.engine.device", "expected one of auto, cuda, cpu"),
    ({"engine": {"kvCache": {"blockSize": 12}}}, "spec.engine.kvCache.blockSize", "8, 16, 32, 64"),
    ({"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs", "0, expected 1 to 65536"),
    ({"engine": {"maxNumSeqs": 1.5}}, "spec.engine.maxNumSeqs", "expected a whole number"),
    ({"engine": {"maxNumSeqs": True}}, "spec.engine.maxNumSeqs", "bool True"),
    ({"engine": {"memoryUtilization": 1.5}}, "spec.engine.memoryUtilization", "expected 0.01 to 1"),
    ({"engine": {"memoryUtilization": "half"}}, "spec.engine.memoryUtilization", "expected a number"),
    ({"engine": {"maxNumSeqs": 9, "maxNumBatchedTokens": 8}}, "spec.engine", "maxNumBatchedTokens is below"),
    ({"engine": {"args": ["--port=1"]}}, "spec.engine", "args holds a flag that the manifest's own fields set"),
    ({"engine": {"args": "--x"}}, "spec.engine.args", "expected a list"),
    ({"engine": {"args": ["-x"] * 65}}, "spec.engine.args", "65 entries, expected at most 64"),
    ({"engine": {"speculative": {"method": "eagle"}}}, "spec.engine.speculative", "write model"),
    ({"engine": {"speculative": {"method": "ngram", "model": "file:///m"}}}, "spec.engine.speculative", "leave model"),
    ({"engine": {"speculative": {"method": "suffix", "model": "file:///m"}}}, "spec.engine.speculative", "leave model"),
    ({"engine": {"speculative": {"method": "eagle3"}}}, "spec.engine.speculative", "write model"),
    ({"pod": {"env": [{"name": "KVASIR_ROUTER_SECRET", "value": "x"}]}}, "spec.pod.env[0]", "leave it out"),
    ({"pod": {"affinity": {"nodeAffinty": {}}}}, "spec.pod.affinity.nodeAffinty",
     "unknown field, expected one of nodeAffinity, podAffinity, podAntiAffinity"),
    ({"pod": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpression": []}]}}}}},
     f"spec.pod.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpression", "unknown field"),
    ({"router": {"pod": {"affinity": {"podAntiAffinity": {PREFERRED: {"weight": 1}}}}}},
     f"spec.router.pod.affinity.podAntiAffinity.{PREFERRED}", "expected a list"),
    ({"pod": {"affinity": {"podAffinity": {REQUIRED: [{"labelSelector": {"matchLabels": {"a": True}}}]}}}},
     f"spec.pod.affinity.podAffinity.{REQUIRED}[0].labelSelector.matchLabels.a", "expected text (quote it)"),
    ({"pod": {"securityContext": {"fsGruop": 1}}}, "spec.pod.securityContext.fsGruop", "unknown field"),
    ({"pod": {"securityContext": {"runAsUser": "root"}}}, "spec.pod.securityContext.runAsUser", "a whole number"),
    ({"disaggregation": {"prefill": {"pod": {"securityContext": {"runAsNonRoot": "true"}}}, "decode": {}}},
     "spec.disaggregation.prefill.pod.securityContext.runAsNonRoot", "expected true or false"),
    ({"pod": {"securityContext": {"capabilities": {"add": "IPC_LOCK"}}}}, "spec.pod.securityContext.capabilities.add",
     "expected a list"),
    ({"replicas": 2, "autoscaling": {"maxReplicas": 2}}, "spec", "not both"),
    ({"replicas": 0, "autoscaling": {"maxReplicas": 2}}, "spec", "not both"),
    ({"replicas": -1}, "spec.replicas", "-1, expected 0 to 1000"),
    ({"replicas": "2"}, "spec.replicas", "str '2', expected a whole number"),
    ({"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.autoscaling", "minReplicas is above"),
    ({"disaggregation": SPLIT, "replicas": 2}, "spec", "under disaggregation.prefill"),
    ({"disaggregation": {"prefill": {"replicas": 1, "autoscaling": {"maxReplicas": 1}}, "decode": {}}},
     "spec.disaggregation.prefill", "not both"),
    ({"disaggregation": SPLIT, "resources": {}}, "spec", "under disaggregation.prefill"),
    ({"disaggregation": SPLIT, "parallelism": {"tensor": 2}}, "spec", "write parallelism under"),
    (
        {"disaggregation": SPLIT | {"remotePrefillMinTokens": "soon"}},
        "spec.disaggregation.remotePrefillMinTokens",
        "auto",
    ),
    ({"engine": {"device": "cpu"}, "resources": {"accelerator": "nvidia.com/gpu"}}, "spec", "device is cpu"),
    ({"engine": {"device": "cuda"}, "resources": {"accelerator": "none"}}, "spec", "device is cuda"),
    ({"engine": {"device": "cuda"}, "resources": {"accelerator": "none", "claims": []}}, "spec", "device is cuda"),
    ({"parallelism": {"tensor": 9}, "resources": {"maxDevices": 8}}, "spec", "above resources.maxDevices"),
    ({"parallelism": {"tensor": 12, "data": 2}, "resources": {"maxDevices": 8}}, "spec", "above resources.maxDevices"),
    (
        {"disaggregation": SPLIT | {"decode": {"parallelism": {"tensor": 3}, "resources": {"maxDevices": 2}}}},
        "spec.disaggregation.decode",
        "write a multiple of it",
    ),
    ({"resources": {"maxDevices": 0}}, "spec.resources.maxDevices", "0, expected 1 to 64"),
    ({"resources": {"memory": "1 GB"}}, "spec.resources.memory", "'1 GB' is not a quantity"),
    ({"resources": {"cpu": 0.5}}, "spec.resources.cpu", "quote it"),
    ({"rollout": {"drainTimeout": "5"}}, "spec.rollout.drainTimeout", "'5' is not a duration"),
    ({"rollout": {"maxSurge": 0}}, "spec.rollout", "raise one of them"),
    ({"rollout": {"maxSurge": "many"}}, "spec.rollout.maxSurge", "'many'"),
    ({"router": {"mode": "gateway", "replicas": 2}}, "spec.router", "router.service and router.resources out"),
    ({"router": {"mode": "gateway", "pod": {"image": "x"}}}, "spec.router", "router.service and router.resources out"),
    ({"router": {"mode": "gateway", "service": {"type": "NodePort"}}}, "spec.router", "router.resources out"),
    ({"router": {"mode": "gateway", "resources": {"cpu": 1}}}, "spec.router", "router.resources out"),
    ({"router": {"mode": "gateway", "apiKeysSecretRef": {"name": "a"}}}, "spec.router", "gateway.apiKeysSecret"),
    ({"router": {"mode": "gateway", "tenantLimits": {"maxInFlight": 1}}}, "spec.router", "gateway.tenantLimits"),
    ({"router": {"tenantLimits": {"maxInFlight": 1}}}, "spec.router", "write router.apiKeysSecretRef too"),
    ({"router": {"tenantLimits": {"maxInFlight": 0}}}, "spec.router.tenantLimits.maxInFlight", "0, expected 1 to"),
    ({"router": {"pod": {"labels": {"serving.kvasir.dev/role": "x"}}}}, "spec.router.pod", "the operator's"),
    ({"rollout": {"canary": {}}}, "spec.rollout.canary.weight", "missing"),
    ({"rollout": {"canary": {"weight": 0}}}, "spec.rollout.canary.weight", "0, expected 1 to 99"),
    ({"rollout": {"canary": {"weight": 100}}}, "spec.rollout.canary.weight", "100, expected 1 to 99"),
    ({"rollout": {"maxSurge": "00%", "maxUnavailable": "0%"}}, "spec.rollout", "raise one of them"),
    ({"suspend": "true"}, "spec.suspend", "expected true or false"),
    ({"resources": {"extra": {"cpu": "1"}}}, "spec.resources", "extra names a resource"),
    ({"resources": {"claims": [{"name": "a"}]}}, "spec.resources.claims[0]", "exactly one of resourceClaimName"),
    ({"resources": {"claims": [{"name": "a", "resourceClaimName": "a", "resourceClaimTemplateName": "b"}]}},
     "spec.resources.claims[0]", "exactly one of resourceClaimName"),
    ({"pod": {"tolerations": [{"operator": "Exists", "value": "b"}]}}, "spec.pod.tolerations[0]", "takes no value"),
    ({"pod": {"tolerations": [{"value": "b"}]}}, "spec.pod.tolerations[0]", "no key needs Exists"),
    ({"pod": {"tolerations": [{"key": "a", "tolerationSeconds": 1}]}}, "spec.pod.tolerations[0]", "effect NoExecute"),
    ({"pod": {"volumes": [{"mountPath": "/a"}]}}, "spec.pod.volumes[0]", "exactly one of configMap, secret and claim"),
    ({"pod": {"volumes": [{"mountPath": "/a", "configMap": {"name": "a"}, "secret": {"name": "b"}}]}},
     "spec.pod.volumes[0]", "exactly one of configMap, secret and claim"),
    ({"pod": {"volumes": [{"mountPath": "a", "claim": {"name": "a"}}]}}, "spec.pod.volumes[0].mountPath", "'a'"),
    *(({"pod": {"volumes": [{"mountPath": path, "claim": {"name": "a"}}]}}, "spec.pod.volumes[0]", "Kvasir mounts")
      for path in ("/", "/tmp", "/tmp/", "//tmp", "/./tmp", "/tmp/.", "/a/../tmp", "/a/..", "/dev/shm", "/models/a",
                   "/model-cache", "/draft-models/a/b", "/etc/kvasir/api-keys", "/a//b")),
    ({"pod": {"affinity": []}}, "spec.pod.affinity", "expected a mapping"),
    ({"autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"maxPercent": 1}}}},
     "spec.autoscaling.behavior.scaleUp.maxPercent", "expected one of policies, selectPolicy, stabilizationWindow"),
    ({"engine": {"maxNumBatchedTokens": 256}, "disaggregation": SPLIT | {"decode": {"engine": {"maxNumSeqs": 257}}}},
     "spec", "of a role's engine over spec.engine"),
    ({"disaggregation": SPLIT | {"prefill": {"engine": {"maxNumBatchedTokens": 255}}}}, "spec", "of a role's engine"),
    ({"disaggregation": SPLIT | {"prefill": {"engine": {"args": ["--port", "1"]}}}},
     "spec.disaggregation.prefill.engine", "args holds a flag"),
    ({"disaggregation": SPLIT | {"prefill": {"engine": {"dtype": "float32"}}}},
     "spec.disaggregation.prefill.engine.dtype", "unknown field"),
    ({"pod": {"labels": {"serving.kvasir.dev/role": "x"}}}, "spec.pod", "the operator's"),
    ({"pod": {"nodeSelector": {1: "x"}}}, "spec.pod.nodeSelector", "quote them"),
    ({"pod": {"env": [{"name": "A"}, {"name": "A"}]}}, "spec.pod.env[1]", "twice"),
    ({"pod": {"env": [{"name": "A", "valueFrom": {}}]}}, "spec.pod.env[0].valueFrom", "exactly one of secretKeyRef"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "path", "message"), REFUSED, ids=[f"{p}: {m}" for _, p, m in REFUSED])
def test_refuses(make_manifest: MakeManifest, spec: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(InvalidManifestError) as refusal:
        parse_service(make_manifest(**spec))

    assert refusal.value.field_path == path
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["Upper", "a.b", "1a", "a-", "a" * 64])
def test_refuses_a_name_that_no_child_could_have(make_manifest: MakeManifest, name: str) -> None:
    with pytest.raises(InvalidManifestError, match="at most 63"):
        parse_service(make_manifest(name=name))


# Written out, so that none is let go by accident.
RESERVED = [
    "--host",
    "--port",
    "--served-model-name",
    "--shutdown-timeout",
    "--device",
    "--dtype",
    "--quantization",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--scheduling-policy",
    "--block-size",
    "--kv-cache-dtype",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--speculative-config",
    "--kv-events-config",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--enable-expert-parallel",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--kv-transfer-config",
]


@pytest.mark.parametrize("flag", RESERVED)
def test_refuses_each_flag_that_a_field_sets_alone_and_with_its_value(make_manifest: MakeManifest, flag: str) -> None:
    for arg in (flag, f"{flag}=x", f"{flag}=x\ny"):
        with pytest.raises(InvalidManifestError, match="args holds a flag"):
            parse_service(make_manifest(engine={"args": ["--max-logprobs", "5", arg]}))


def test_the_list_of_refused_flags_is_whole() -> None:
    assert set(RESERVED) == set(RESERVED_ARGS)


CLAIMS = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]

# Each is at the edge of a bound or rule, on its good side: one further and it would be refused.
HOLDS: list[dict[str, Any]] = [
    {"model": {"source": "file:///a", "name": "x" * 128}},
    {"engine": {"args": ["x" * 1024] * 64}},
    {"engine": {"args": ["--ports", "--hostname=x", "--max-num", "port"]}},
    {"parallelism": {"pipeline": 2}, "engine": {"args": ["--pipeline-layer-partition", "42,38"]}},
    {"parallelism": {"tensor": 7}, "resources": {"maxDevices": 8}},
    {"parallelism": {"tensor": 8}, "resources": {"maxDevices": 8}},
    {"parallelism": {"tensor": 16, "pipeline": 2}, "resources": {"maxDevices": 8}},
    {"parallelism": {"tensor": 64}, "resources": {"maxDevices": 1}},
    {"parallelism": {"tensor": 2, "data": 4}, "resources": {"maxDevices": 8}},
    {"parallelism": {"tensor": 3, "data": 3}, "resources": {"maxDevices": 8}},
    {"parallelism": {"tensor": 16, "pipeline": 2, "data": 2}, "resources": {"maxDevices": 8}},
    {"engine": {"maxNumSeqs": 8, "maxNumBatchedTokens": 8}},
    {"disaggregation": SPLIT | {"prefill": {"engine": {"maxNumBatchedTokens": 256}}}},
    {"autoscaling": {"minReplicas": 2, "maxReplicas": 2}},
    {"autoscaling": {"maxReplicas": 2}, "replicas": 1},
    {"rollout": {"canary": {"weight": 1}}},
    {"rollout": {"canary": {"weight": 99}}},
    {"rollout": {"maxSurge": "1%"}},
    {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    {"router": {"mode": "gateway", "pod": {}, "resources": {}}},
    {"router": {"mode": "dedicated", "apiKeysSecretRef": {"name": "a"}, "resources": {"cpu": 1}}},
    {"router": {"apiKeysSecretRef": {"name": "a"}, "tenantLimits": {"tokensPerMinute": 1}}},
    {"engine": {"device": "cuda"}, "resources": {"accelerator": "none", "claims": CLAIMS}},
    {"resources": {"extra": {"rdma/ib": 1, "hugepages-1Gi": "2Gi", "ephemeral-storage": "1Gi"}}},
    {
        "resources": {
            "claims": [{"name": "a", "resourceClaimName": "x"}, {"name": "b", "resourceClaimTemplateName": "x"}]
        }
    },
]


@pytest.mark.parametrize("spec", HOLDS, ids=map(str, HOLDS))
def test_accepts_what_just_holds(make_manifest: MakeManifest, spec: dict[str, Any]) -> None:
    parse_service(make_manifest(**spec))


def test_accepts_the_longest_name(make_manifest: MakeManifest) -> None:
    assert parse_service(make_manifest(name="a" * 63)).name == "a" * 63


def test_nulls_are_absent_but_in_objects_that_are_passed_through(make_service: MakeService) -> None:
    service = make_service(
        replicas=None,
        pod={"labels": {"a": None}, "securityContext": {"runAsUser": None, "seLinuxOptions": {"level": None}}},
    )

    assert service.spec.replicas == 1
    assert service.spec.pod.labels == {}
    assert service.spec.pod.security_context == {"runAsUser": None, "seLinuxOptions": {"level": None}}


def test_the_autoscalers_behavior_has_the_words_of_a_horizontal_pod_autoscaler(make_service: MakeService) -> None:
    policies = [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 60},
    ]
    up = {"stabilizationWindowSeconds": 0, "selectPolicy": "Min", "policies": policies}
    service = make_service(autoscaling={"maxReplicas": 2, "behavior": {"scaleUp": up}})

    assert service.spec.autoscaling is not None
    assert service.spec.autoscaling.behavior.scale_up == ScalingRules(
        0, "Min", (ScalingPolicy("Percent", 100, 15), ScalingPolicy("Pods", 4, 60))
    )
    assert service.spec.autoscaling.behavior.scale_down == ScalingRules(None, "Max", ())


def test_refuses_an_alias_that_is_the_services_own_name(make_manifest: MakeManifest) -> None:
    with pytest.raises(InvalidManifestError, match="repeats the name"):
        parse_service(make_manifest(model={"source": "file:///m", "aliases": ["llama"]}))


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ([], "list"),
        ({"kind": "InferenceService"}, "apiVersion: missing"),
        ({"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "Pod"}, "expected InferenceService"),
        ({"apiVersion": "serving.kvasir.dev/v1alpha1", "kind": "InferenceService"}, "metadata: missing"),
    ],
)
def test_refuses_what_is_no_inference_service(manifest: Any, message: str) -> None:
    with pytest.raises(InvalidManifestError, match=message):
        parse_service(manifest)


def test_a_stored_service_is_cared_for_whatever_it_passes_through(make_service: MakeService) -> None:
    pod = {"affinity": {"nodeAffinty": {}}, "securityContext": {"runAsUser": "root"}}
    assert make_service(uid="1-2", pod=pod).spec.pod.affinity == pod["affinity"]


def test_kubernetes_own_objects_have_the_fields_that_its_client_knows(make_service: MakeService) -> None:
    """Each with a value of its type, as deep as they go."""
    affinity, pod, container = (full(kind) for kind in ("V1Affinity", "V1PodSecurityContext", "V1SecurityContext"))
    parsed = make_service(pod={"affinity": affinity, "securityContext": {**pod, **container}}).spec.pod
    assert (parsed.affinity, parsed.security_context) == (affinity, {**pod, **container})


def full(kind: str) -> Any:
    if kind.startswith("List["):
        return [full(kind[5:-1])]
    if kind.startswith("Dict["):
        return {"key": full(kind.partition(", ")[2][:-1])}
    if kind in SCALARS:
        return SCALARS[kind]
    model = getattr(models, kind)
    return {model.attribute_map[name]: full(below) for name, below in model.openapi_types.items()}
