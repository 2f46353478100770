"""Specs that contradict themselves, each with the field and the advice that the refusal must give.

One row for every CEL rule of the CRD at every place where it stands; test_crd.py checks that none is missing.
"""

from dataclasses import dataclass
from typing import Any

MODEL = {"source": "hf://org/name"}
ONE_OR_THE_OTHER = "write replicas or autoscaling, not both: an autoscaled role owns its own replica count"
SOURCE_FORMS = "write hf://ORG/NAME[@REVISION], s3://BUCKET[/PREFIX], pvc://CLAIM[/PATH], oci://IMAGE or file:///PATH"
NO_PARENT = "write the path without .. in it"
FEWEST_ABOVE_MOST = "minReplicas is above maxReplicas: lower it or raise maxReplicas"
BOTH = {"replicas": 1, "autoscaling": {"maxReplicas": 2}}
UPSIDE_DOWN = {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}


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


CONTRADICTIONS = [
    Broken(
        "",
        "metadata.name becomes part of Service names: write at most 52 of a-z, 0-9 and -, first a letter, last no -",
        {},
        name="m" * 53,
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
        "engine.device is cuda: name the accelerator's resource in resources.accelerator, or leave it out for "
        "nvidia.com/gpu",
        {"engine": {"device": "cuda"}, **disaggregated({}, {"resources": {"accelerator": "none"}})},
    ),
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
        "args holds a flag that the operator sets: use router and rollout fields, model.name and model.aliases instead "
        "of --host, --port, --served-model-name and --shutdown-timeout",
        {"engine": {"args": ["--port=9000"]}},
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
        "spec.pod",
        "labels under serving.kvasir.dev/ are the operator's: choose other keys",
        {"pod": {"labels": {"serving.kvasir.dev/role": "decode"}}},
    ),
    Broken(
        "spec.pod.env[]",
        "write value or valueFrom, not both",
        {"pod": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}},
    ),
    Broken(
        "spec.pod.env[]",
        "KVASIR_ROUTER_SECRET is the operator's, and the router has the same: leave it out",
        {"pod": {"env": [{"name": "KVASIR_ROUTER_SECRET", "value": "mine"}]}},
    ),
    Broken(
        "spec.pod.env[].valueFrom",
        "write exactly one of secretKeyRef, configMapKeyRef and fieldRef",
        {"pod": {"env": [{"name": "A", "valueFrom": {}}]}},
    ),
    Broken("spec.autoscaling", FEWEST_ABOVE_MOST, UPSIDE_DOWN),
    Broken("spec.disaggregation.prefill", ONE_OR_THE_OTHER, disaggregated(BOTH, {})),
    Broken("spec.disaggregation.decode", ONE_OR_THE_OTHER, disaggregated({}, BOTH)),
    Broken("spec.disaggregation.prefill.autoscaling", FEWEST_ABOVE_MOST, disaggregated(UPSIDE_DOWN, {})),
    Broken("spec.disaggregation.decode.autoscaling", FEWEST_ABOVE_MOST, disaggregated({}, UPSIDE_DOWN)),
    Broken(
        "spec.router",
        "mode gateway is served by the chart's shared router: leave router.replicas out",
        {"router": {"mode": "gateway", "replicas": 2}},
    ),
    Broken(
        "spec.rollout",
        "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: raise one of them",
        {"rollout": {"maxSurge": "0%", "maxUnavailable": 0}},
    ),
]

WRONG_VALUES = [
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
]
