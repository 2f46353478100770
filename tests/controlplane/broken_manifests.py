"""Specs that contradict themselves, each with the field and the advice that the refusal must give; and some that don't.

One row for every CEL rule of the CRD at every place where it stands; test_crd.py checks that none is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = {"source": "hf://org/name"}
ONE_OR_THE_OTHER = "write replicas or autoscaling, not both: an autoscaled role owns its own replica count"
SOURCE_FORMS = "write hf://ORG/NAME[@REVISION], s3://BUCKET[/PREFIX], pvc://CLAIM[/PATH], oci://IMAGE or file:///PATH"
NO_PARENT = "write the path without .. in it"
FEWEST_ABOVE_MOST = "minReplicas is above maxReplicas: lower it or raise maxReplicas"
BOTH = {"replicas": 2, "autoscaling": {"maxReplicas": 2}}
WHOLE_PROMPTS = ["--no-enable-chunked-prefill"]
UPSIDE_DOWN = {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}


RESERVED_ARG = (
    "args holds a flag that the manifest's own fields set: write the field of engine, parallelism, model or rollout, "
    "and leave --host and --port out"
)
Place = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Broken:
    """A manifest that must be refused at `field` with `message`."""

    field: str
    """As the API server spells it, list indices left out; the empty string is the whole object."""
    message: str
    spec: dict[str, Any]
    """`model` is added where absent."""
    name: str = "llama"


def disaggregated(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    return {"disaggregation": {"prefill": prefill, "decode": decode}}


def adapter(source: str) -> dict[str, Any]:
    return {"engine": {"adapters": {"list": [{"name": "sql", "source": source}]}}}


def drafted_by(source: str) -> dict[str, Any]:
    return {"engine": {"speculative": {"method": "draftModel", "model": source}}}


# Where the groups stand that a manifest may hold several times, each with what puts one there.
ROLES: dict[str, Place] = {
    "prefill": lambda group: disaggregated(group, {}),
    "decode": lambda group: disaggregated({}, group),
}
POD_PLACES: dict[str, Place] = {
    "spec.pod": lambda pod: {"pod": pod},
    "spec.router.pod": lambda pod: {"router": {"pod": pod}},
    "spec.disaggregation.prefill.pod": lambda pod: disaggregated({"pod": pod}, {}),
    "spec.disaggregation.decode.pod": lambda pod: disaggregated({}, {"pod": pod}),
}
RESOURCES_PLACES: dict[str, Place] = {
    "spec.resources": lambda resources: {"resources": resources},
    "spec.disaggregation.prefill.resources": lambda resources: disaggregated({"resources": resources}, {}),
    "spec.disaggregation.decode.resources": lambda resources: disaggregated({}, {"resources": resources}),
}


PARALLELISM_PLACES: dict[str, Place] = {
    "spec.parallelism": lambda parallelism: {"parallelism": parallelism},
    "spec.disaggregation.prefill.parallelism": lambda parallelism: disaggregated({"parallelism": parallelism}, {}),
    "spec.disaggregation.decode.parallelism": lambda parallelism: disaggregated({}, {"parallelism": parallelism}),
}
OWN_FOLDER = (
    "mountPath is a folder that Kvasir mounts itself (/tmp, /dev/shm, /model-cache, /models, /draft-models, "
    "/etc/kvasir), or has empty parts, . or .. in it: choose another, written plainly"
)
NO_TENSOR_RANKS = (
    "expert shares out experts among tensor ranks, of which there is one: raise tensor, or leave expert out"
)


CPU_ABOVE_LIMIT = (
    "cpu, which a node must have free, is above cpuLimit, the most that is used of it: lower cpu or raise cpuLimit"
)
TOO_MANY_DEVICES = (
    "tensor is above resources.maxDevices, the most devices of a pod: for a group of pods write a multiple of it"
)


def placed(most: int, **degrees: int) -> dict[str, Any]:
    return {"parallelism": degrees, "resources": {"maxDevices": most}}


def broken_pods(path: str, at: Place) -> list[Broken]:
    pod_ip = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        Broken(
            path,
            "labels under serving.kvasir.dev/ are the operator's: choose other keys",
            at({"labels": {"serving.kvasir.dev/role": "decode"}}),
        ),
        Broken(
            f"{path}.env[]",
            "write value or valueFrom, not both",
            at({"env": [{"name": "A", "value": "1", "valueFrom": pod_ip}]}),
        ),
        Broken(
            f"{path}.env[]",
            "KVASIR_ROUTER_SECRET is the operator's, and the router has the same: leave it out",
            at({"env": [{"name": "KVASIR_ROUTER_SECRET", "value": "mine"}]}),
        ),
        Broken(
            f"{path}.tolerations[]",
            "operator Exists takes no value, no key needs Exists, and tolerationSeconds needs effect NoExecute",
            at({"tolerations": [{"key": "gpu", "operator": "Exists", "value": "a"}]}),
        ),
        Broken(
            f"{path}.env[].valueFrom",
            "write exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            at({"env": [{"name": "A", "valueFrom": {}}]}),
        ),
        Broken(
            f"{path}.volumes[]",
            "write exactly one of configMap, secret and claim",
            at({"volumes": [{"mountPath": "/a", "secret": {"name": "a"}, "claim": {"name": "a"}}]}),
        ),
        Broken(f"{path}.volumes[]", OWN_FOLDER, at({"volumes": [{"mountPath": "/tmp", "secret": {"name": "a"}}]})),
    ]


def broken_resources(path: str, at: Place) -> list[Broken]:
    return [
        Broken(
            path,
            "extra names a resource that no node has: write VENDOR/NAME, hugepages-SIZE or ephemeral-storage, and cpu, "
            "memory and the accelerator in their own fields",
            at({"extra": {"memory": "1Gi"}}),
        ),
        Broken(path, CPU_ABOVE_LIMIT, at({"cpu": 2, "cpuLimit": "1500m"})),
        Broken(
            f"{path}.claims[]",
            "write exactly one of resourceClaimName and resourceClaimTemplateName",
            at({"claims": [{"name": "gpu"}]}),
        ),
    ]


CONTRADICTIONS = [
    Broken(
        "",
        "metadata.name becomes part of Service names: write at most 63 of a-z, 0-9 and -, first a letter, last no -",
        {},
        name="m" * 64,
    ),
    Broken(
        "",
        "spec.model.aliases repeats the name that the model already has: leave it out",
        {"model": MODEL | {"name": "a", "aliases": ["b", "a"]}},
    ),
    Broken("spec", ONE_OR_THE_OTHER, BOTH),
    Broken(
        "spec",
        "with disaggregation, write replicas, autoscaling and resources under disaggregation.prefill and "
        "disaggregation.decode",
        {"replicas": 2, **disaggregated({}, {})},
    ),
    Broken(
        "spec",
        "with disaggregation, write parallelism under disaggregation.prefill and disaggregation.decode",
        {"parallelism": {"tensor": 2}, **disaggregated({}, {})},
    ),
    Broken(
        "spec",
        "engine.device is cpu: write resources.accelerator: none, or leave it out",
        {"engine": {"device": "cpu"}, "resources": {"accelerator": "nvidia.com/gpu"}},
    ),
    Broken(
        "spec",
        "engine.device is cuda: name the accelerator's resource in resources.accelerator, leave it out for "
        "nvidia.com/gpu, or write resources.claims for devices",
        {"engine": {"device": "cuda"}, **disaggregated({}, {"resources": {"accelerator": "none", "claims": []}})},
    ),
    *(Broken(path, NO_TENSOR_RANKS, at({"expert": True})) for path, at in PARALLELISM_PLACES.items()),
    Broken("spec.model.source", SOURCE_FORMS, {"model": {"source": "meta-llama/Llama-3.1-8B"}}),
    Broken("spec.model.source", NO_PARENT, {"model": {"source": "file:///models/../etc"}}),
    Broken(
        "spec.model.cache",
        "write exactly one of claim, hostPath and sizeLimit",
        {"model": MODEL | {"cache": {"claim": "cache", "sizeLimit": "1Gi"}}},
    ),
    Broken(
        "spec.engine",
        "maxNumBatchedTokens is below maxNumSeqs: each running request needs one token of a step, so raise it or lower "
        "maxNumSeqs",
        {"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}},
    ),
    Broken(
        "spec.engine",
        RESERVED_ARG,
        {"engine": {"args": ["--max-logprobs", "5", "--port=9000"]}},
    ),
    Broken(
        "spec.engine.speculative",
        "methods ngram and suffix draft from text seen before: leave model out",
        {"engine": {"speculative": {"method": "ngram", "model": "hf://org/draft"}}},
    ),
    Broken(
        "spec.engine.speculative",
        "this method drafts with a model of its own: write model",
        {"engine": {"speculative": {"method": "eagle"}}},
    ),
    Broken("spec.engine.speculative.model", SOURCE_FORMS, drafted_by("https://example.com/draft")),
    Broken("spec.engine.speculative.model", NO_PARENT, drafted_by("s3://models/../draft")),
    Broken("spec.engine.adapters.list[].source", SOURCE_FORMS, adapter("sql-lora")),
    Broken("spec.engine.adapters.list[].source", NO_PARENT, adapter("pvc://adapters/../sql")),
    Broken(
        "spec.engine",
        "maxNumBatchedTokens is below maxModelLen, and args has --no-enable-chunked-prefill, so a long prompt would "
        "never fit into a step: raise it, lower maxModelLen, or leave the flag out",
        {"engine": {"args": WHOLE_PROMPTS, "maxNumBatchedTokens": 4095, "maxModelLen": 4096}},
    ),
    Broken("spec.router.resources", CPU_ABOVE_LIMIT, {"router": {"resources": {"cpu": "1", "cpuLimit": "999m"}}}),
    Broken("spec.autoscaling", FEWEST_ABOVE_MOST, UPSIDE_DOWN),
    Broken("spec.disaggregation.prefill", ONE_OR_THE_OTHER, disaggregated(BOTH, {})),
    Broken("spec.disaggregation.decode", ONE_OR_THE_OTHER, disaggregated({}, BOTH)),
    Broken("spec.disaggregation.prefill.autoscaling", FEWEST_ABOVE_MOST, disaggregated(UPSIDE_DOWN, {})),
    Broken("spec.disaggregation.decode.autoscaling", FEWEST_ABOVE_MOST, disaggregated({}, UPSIDE_DOWN)),
    Broken(
        "spec.router",
        "mode gateway is served by the chart's shared router: leave router.replicas, router.pod, router.service and "
        "router.resources out",
        {"router": {"mode": "gateway", "resources": {"memory": "1Gi"}}},
    ),
    Broken(
        "spec.router",
        "mode gateway asks for the API keys of the chart's shared router: leave router.apiKeysSecretRef and "
        "router.tenantLimits out, and set the chart's gateway.apiKeysSecret and gateway.tenantLimits",
        {"router": {"mode": "gateway", "apiKeysSecretRef": {"name": "keys"}}},
    ),
    Broken(
        "spec.router",
        "tenantLimits are limits to each tenant, and tenants are told apart by their API keys: write "
        "router.apiKeysSecretRef too",
        {"router": {"tenantLimits": {"maxInFlight": 4}}},
    ),
    Broken(
        "spec.rollout",
        "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: raise one of them",
        {"rollout": {"maxSurge": "0%", "maxUnavailable": 0}},
    ),
    Broken(
        "spec",
        "of a role's engine over spec.engine, maxNumBatchedTokens is below maxNumSeqs: each running request needs one "
        "token of a step, so raise it or lower maxNumSeqs",
        {"engine": {"maxNumBatchedTokens": 256}, **disaggregated({"engine": {"maxNumSeqs": 257}}, {})},
    ),
    *(
        Broken(f"spec.disaggregation.{role}.engine", RESERVED_ARG, split({"engine": {"args": ["--dtype", "float32"]}}))
        for role, split in ROLES.items()
    ),
    Broken("spec", TOO_MANY_DEVICES, placed(8, tensor=9)),
    Broken("spec", TOO_MANY_DEVICES, placed(8, tensor=12, data=2)),
    *(
        Broken(f"spec.disaggregation.{role}", TOO_MANY_DEVICES, split(placed(2, tensor=3)))
        for role, split in ROLES.items()
    ),
    *(broken for path, at in POD_PLACES.items() for broken in broken_pods(path, at)),
    *(broken for path, at in RESOURCES_PLACES.items() for broken in broken_resources(path, at)),
]

# Manifests at the edge of a rule, on its good side.
NEIGHBOURS = ("/tmp/a", "/tmpa", "/dev/shm2", "/etc", "/etc/kvasir2", "/models2", "/a/tmp", "/..a/b.", "/model")
JUST_RIGHT = {
    "the longest name": ({}, "m" * 63),
    "the shortest name": ({}, "m"),
    "one replica beside autoscaling, which is the default": (
        {"replicas": 1, "autoscaling": {"maxReplicas": 2}},
        "llama",
    ),
    "as many replicas at least as at most": ({"autoscaling": {"minReplicas": 2, "maxReplicas": 2}}, "llama"),
    "as much CPU as the limit": ({"resources": {"cpu": 1, "cpuLimit": "1000m"}}, "llama"),
    "a step for a whole prompt": (
        {"engine": {"args": WHOLE_PROMPTS, "maxNumBatchedTokens": 4096, "maxModelLen": 4096}},
        "llama",
    ),
    "a token for each request": ({"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 64}}, "llama"),
    "a token for each request of a role": (
        {"engine": {"maxNumBatchedTokens": 512}, **disaggregated({}, {"engine": {"maxNumSeqs": 512}})},
        "llama",
    ),
    "a role with more tokens than the service": (
        {
            "engine": {"maxNumBatchedTokens": 256},
            **disaggregated({"engine": {"maxNumSeqs": 512, "maxNumBatchedTokens": 512}}, {}),
        },
        "llama",
    ),
    "flags that begin like reserved ones": ({"engine": {"args": ["--port-range=1", "--hosts", "x--host"]}}, "llama"),
    "a gateway's router with nothing to say": (
        {"router": {"mode": "gateway", "pod": {}, "resources": {}, "service": {"annotations": {}}}},
        "llama",
    ),
    "a dedicated router with all there is": (
        {"router": {"replicas": 0, "pod": {"image": "x"}, "service": {"type": "NodePort"}}},
        "llama",
    ),
    "as many ranks as a pod has devices": (placed(8, tensor=8), "llama"),
    "fewer ranks than a pod has devices": (placed(8, tensor=7), "llama"),
    "twice the ranks of a pod": (placed(8, tensor=16, pipeline=2), "llama"),
    "copies that fill a pod": (placed(8, tensor=2, data=4), "llama"),
    "copies beyond a pod": (placed(8, tensor=8, pipeline=2, data=2), "llama"),
    "copies of several pods each": (placed(8, tensor=16, data=3), "llama"),
    "a limit without degrees": ({"resources": {"maxDevices": 1}}, "llama"),
    "a role's limit without degrees": (disaggregated({"resources": {"maxDevices": 1}}, {}), "llama"),
    "copies within a pod": ({"parallelism": {"tensor": 2, "data": 2}}, "llama"),
    "copies of stages": ({"parallelism": {"tensor": 2, "pipeline": 2, "data": 2}}, "llama"),
    "stages of many devices": ({"parallelism": {"tensor": 8, "pipeline": 2}}, "llama"),
    "experts over tensor ranks": ({"parallelism": {"tensor": 2, "expert": True}}, "llama"),
    "surge alone": ({"rollout": {"maxSurge": "1%", "maxUnavailable": "00%"}}, "llama"),
    "unavailability alone": ({"rollout": {"maxSurge": 0, "maxUnavailable": "10%"}}, "llama"),
    "the smallest canary": ({"rollout": {"canary": {"weight": 1}}}, "llama"),
    "the largest canary": ({"rollout": {"canary": {"weight": 99, "pause": False}}}, "llama"),
    "folders beside those of Kvasir": (
        {"pod": {"volumes": [{"mountPath": at, "claim": {"name": "a"}} for at in NEIGHBOURS]}},
        "llama",
    ),
    "labels of a neighbour's domain": (
        {"pod": {"labels": {"serving.kvasir.dev": "x", "kvasir.dev/role": "x"}}},
        "llama",
    ),
    "as many aliases as may be": ({"model": MODEL | {"aliases": [f"a{number}" for number in range(32)]}}, "llama"),
    "a name as long as may be": ({"model": MODEL | {"name": "x" * 128}}, "llama"),
    "nulls, which are dropped": (
        {"pod": None, "replicas": None, "engine": {"maxModelLen": None, "dtype": None, "args": None}},
        "llama",
    ),
    "a null in a map": ({"pod": {"labels": {"a": None}}}, "llama"),
    "a suspended service": ({"suspend": True}, "llama"),
    "devices by claims alone": (
        {
            "engine": {"device": "cuda"},
            **disaggregated(
                {"resources": {"accelerator": "none", "claims": [{"name": "gpu", "resourceClaimName": "gpus"}]}}, {}
            ),
        },
        "llama",
    ),
    "a device of the processor without an accelerator": (
        {"engine": {"device": "cpu"}, "resources": {"accelerator": "none", "extra": {"hugepages-2Mi": "1Gi"}}},
        "llama",
    ),
}

WRONG_VALUES = [
    Broken("spec.rollout.canary.weight", "greater than or equal to 1", {"rollout": {"canary": {"weight": 0}}}),
    Broken("spec.rollout.canary.weight", "less than or equal to 99", {"rollout": {"canary": {"weight": 100}}}),
    Broken("spec.rollout.canary.weight", "Required value", {"rollout": {"canary": {"pause": True}}}),
    Broken("spec.rollout.maxUnavailable", "should match", {"rollout": {"maxUnavailable": "150%"}}),
    Broken("spec.rollout.drainTimeout", "should match", {"rollout": {"drainTimeout": f"{10**9}h"}}),
    Broken("spec.router.probes.failureThreshold", "greater than or equal to 1",
           {"router": {"probes": {"failureThreshold": 0}}}),
    Broken("spec.resources.maxDevices", "greater than or equal to 1", {"resources": {"maxDevices": 0}}),
    Broken("spec.rollout.historyLimit", "less than or equal to 20", {"rollout": {"historyLimit": 21}}),
    Broken("spec.suspend", "must be of type boolean", {"suspend": "yes"}),
    Broken("spec.pod.volumes[]", "Duplicate value", {"pod": {"volumes": [
        {"mountPath": "/a", "claim": {"name": "a"}}, {"mountPath": "/a", "claim": {"name": "b"}}]}}),
    Broken("spec.resources.claims[]", "Duplicate value", {"resources": {"claims": [
        {"name": "a", "resourceClaimName": "a"}, {"name": "a", "resourceClaimName": "b"}]}}),
    Broken("spec.router.service.type", "supported values", {"router": {"service": {"type": "ExternalName"}}}),
    Broken("spec.autoscaling.behavior.scaleUp.selectPolicy", "supported values",
           {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"selectPolicy": "Sum"}}}}),
    Broken("spec.autoscaling.behavior.scaleDown.policies[].periodSeconds", "less than or equal to 1800",
           {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleDown": {"policies": [
               {"type": "Pods", "value": 1, "periodSeconds": 1801}]}}}}),
    Broken("spec.model.source", "Required value", {"model": {}}),
    Broken("spec.model.secretRef.name", "Required value", {"model": MODEL | {"secretRef": {}}}),
    Broken("spec.model.aliases[]", "Duplicate value", {"model": MODEL | {"aliases": ["a", "a"]}}),
    Broken("spec.engine.device", 'supported values: "auto", "cuda", "cpu"', {"engine": {"device": "tpu"}}),
    Broken("spec.engine.maxNumSeqs", "greater than or equal to 1", {"engine": {"maxNumSeqs": 0}}),
    Broken("spec.engine.maxNumSeqs", "must be of type integer", {"engine": {"maxNumSeqs": "many"}}),
    Broken("spec.engine.memoryUtilization", "less than or equal to 1", {"engine": {"memoryUtilization": 1.5}}),
    Broken("spec.engine.kvCache.blockSize", "supported values", {"engine": {"kvCache": {"blockSize": 24}}}),
    Broken("spec.engine.kvCache.hostMemory", "should match", {"engine": {"kvCache": {"hostMemory": "8 GB"}}}),
    Broken("spec.engine.adapters.list[]", "Duplicate value", {"engine": {"adapters": {"list": [
        {"name": "sql", "source": "hf://org/a"}, {"name": "sql", "source": "hf://org/b"}]}}}),
    Broken("spec.parallelism.tensor", "greater than or equal to 1", {"parallelism": {"tensor": 0}}),
    Broken("spec.replicas", "greater than or equal to 0", {"replicas": -1}),
    Broken("spec.autoscaling.maxReplicas", "Required value", {"autoscaling": {}}),
    Broken("spec.autoscaling.slo.timeToFirstToken", "should match",
           {"autoscaling": {"maxReplicas": 2, "slo": {"timeToFirstToken": "0.5s"}}}),
    Broken("spec.disaggregation.decode", "Required value", {"disaggregation": {"prefill": {}}}),
    Broken("spec.router.policy", "supported values", {"router": {"policy": "random"}}),
    Broken("spec.rollout.maxSurge", "should match", {"rollout": {"maxSurge": "half"}}),
]  # fmt: skip

UNKNOWN_FIELDS = [
    ("spec.modle", {"modle": {}}),
    ("spec.engine.maxSeqs", {"engine": {"maxSeqs": 4}}),
    ("spec.engine.kvCache.blocksize", {"engine": {"kvCache": {"blocksize": 16}}}),
    ("spec.pod.containers", {"pod": {"containers": []}}),
    ("spec.disaggregation.prefill.router", disaggregated({"router": {}}, {})),
    ("spec.disaggregation.prefill.engine.dtype", disaggregated({"engine": {"dtype": "float32"}}, {})),
    (
        "spec.autoscaling.behavior.scaleUp.stabilization",
        {"autoscaling": {"maxReplicas": 2, "behavior": {"scaleUp": {"stabilization": "0s"}}}},
    ),
]
