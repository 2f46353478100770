"""Every field of the manifest does something: it changes a child object, or it is named as not acted on."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import pytest

from kvasir_operator.api.fields import bare, manifest_fields
from kvasir_operator.api.model import InferenceService, ServiceSpec
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource
from kvasir_operator.desired import desired_objects, revision_of, unsupported_features
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
SETTINGS = OperatorSettings()
AUTOSCALED = {"maxReplicas": 3}

# For each field, by its path: the spec's groups before, and the same with the field set to something else.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model.source": ({"model": {"source": "file:///a"}}, {"model": {"source": "file:///b"}}),
    "model.name": ({}, {"model": {"source": "file:///models/llama", "name": "big"}}),
    "model.aliases": ({}, {"model": {"source": "file:///models/llama", "aliases": ["b"]}}),
    "model.secretRef": ({}, {"model": {"source": "file:///models/llama", "secretRef": {"name": "s"}}}),
    "model.cache": ({}, {"model": {"source": "file:///models/llama", "cache": {"claim": "c"}}}),
    "engine.device": ({}, {"engine": {"device": "cuda"}}),
    "engine.dtype": ({}, {"engine": {"dtype": "float32"}}),
    "engine.quantization": ({}, {"engine": {"quantization": "auto"}}),
    "engine.maxModelLen": ({}, {"engine": {"maxModelLen": 512}}),
    "engine.maxNumSeqs": ({}, {"engine": {"maxNumSeqs": 8}}),
    "engine.maxNumBatchedTokens": ({}, {"engine": {"maxNumBatchedTokens": 512}}),
    "engine.memoryUtilization": ({}, {"engine": {"memoryUtilization": 0.5}}),
    "engine.scheduling": ({}, {"engine": {"scheduling": "fcfs"}}),
    "engine.kvCache.blockSize": ({}, {"engine": {"kvCache": {"blockSize": 32}}}),
    "engine.kvCache.dtype": ({}, {"engine": {"kvCache": {"dtype": "fp8_e4m3"}}}),
    "engine.kvCache.prefixCaching": ({}, {"engine": {"kvCache": {"prefixCaching": False}}}),
    "engine.kvCache.hostMemory": ({}, {"engine": {"kvCache": {"hostMemory": "1Gi"}}}),
    "engine.kvCache.disk": ({}, {"engine": {"kvCache": {"disk": {"sizeLimit": "1Gi"}}}}),
    "engine.speculative.method": (
        {"engine": {"speculative": {"method": "ngram"}}},
        {"engine": {"speculative": {"method": "suffix"}}},
    ),
    "engine.speculative.model": (
        {"engine": {"speculative": {"method": "eagle", "model": "file:///a"}}},
        {"engine": {"speculative": {"method": "eagle", "model": "file:///b"}}},
    ),
    "engine.speculative.numTokens": (
        {"engine": {"speculative": {"method": "ngram"}}},
        {"engine": {"speculative": {"method": "ngram", "numTokens": 2}}},
    ),
    "engine.adapters": ({}, {"engine": {"adapters": {}}}),
    "engine.args": ({}, {"engine": {"args": ["--x"]}}),
    "parallelism.tensor": ({}, {"parallelism": {"tensor": 2}}),
    "parallelism.pipeline": ({}, {"parallelism": {"pipeline": 2}}),
    "parallelism.data": ({}, {"parallelism": {"data": 2}}),
    "parallelism.expert": ({}, {"parallelism": {"expert": True}}),
    "resources.accelerator": ({}, {"resources": {"accelerator": "amd.com/gpu"}}),
    "resources.cpu": ({}, {"resources": {"cpu": 1}}),
    "resources.memory": ({}, {"resources": {"memory": "1Gi"}}),
    "resources.sharedMemory": ({}, {"resources": {"sharedMemory": "1Gi"}}),
    "pod.image": ({}, {"pod": {"image": "mine:1"}}),
    "pod.nodeSelector": ({}, {"pod": {"nodeSelector": {"a": "b"}}}),
    "pod.tolerations": ({}, {"pod": {"tolerations": [{"operator": "Exists"}]}}),
    "pod.affinity": ({}, {"pod": {"affinity": {"nodeAffinity": {}}}}),
    "pod.topologySpread": ({}, {"pod": {"topologySpread": "none"}}),
    "pod.priorityClassName": ({}, {"pod": {"priorityClassName": "high"}}),
    "pod.serviceAccountName": ({}, {"pod": {"serviceAccountName": "mine"}}),
    "pod.labels": ({}, {"pod": {"labels": {"a": "b"}}}),
    "pod.annotations": ({}, {"pod": {"annotations": {"a": "b"}}}),
    "pod.env": ({}, {"pod": {"env": [{"name": "A", "value": "1"}]}}),
    "replicas": ({}, {"replicas": 2}),
    "autoscaling": ({}, {"autoscaling": AUTOSCALED}),
    "disaggregation": ({}, {"disaggregation": {"prefill": {}, "decode": {}}}),
    "router.mode": ({}, {"router": {"mode": "gateway"}}),
    "router.replicas": ({}, {"router": {"replicas": 3}}),
    "router.policy": ({}, {"router": {"policy": "leastWork"}}),
    "router.apiKeysSecretRef": ({}, {"router": {"apiKeysSecretRef": {"name": "s"}}}),
    "router.maxQueueSize": ({}, {"router": {"maxQueueSize": 1}}),
    "router.maxQueueWait": ({}, {"router": {"maxQueueWait": "1s"}}),
    "router.resources.cpu": ({}, {"router": {"resources": {"cpu": 2}}}),
    "router.resources.memory": ({}, {"router": {"resources": {"memory": "1Gi"}}}),
    "rollout.maxSurge": ({}, {"rollout": {"maxSurge": 2}}),
    "rollout.maxUnavailable": ({}, {"rollout": {"maxUnavailable": 1}}),
    "rollout.drainTimeout": ({}, {"rollout": {"drainTimeout": "1s"}}),
    "monitoring.podMonitor": ({}, {"monitoring": {"podMonitor": "none"}}),
}
# What is named as a whole needs no word about its parts.
NAMED_AS_A_WHOLE = ("model.secretRef", "model.cache", "engine.kvCache.disk", "engine.adapters")
NAMED_AS_A_WHOLE += ("autoscaling", "disaggregation", "router.apiKeysSecretRef", "pod.tolerations", "pod.env")


def leaves(group: Any, path: str) -> Iterator[str]:
    for f in manifest_fields(group):
        field_path = f"{path}.{f.key}".lstrip(".")
        kind = bare(f.hint)
        is_group = dataclasses.is_dataclass(kind) and kind not in (Duration, Quantity, ModelSource)
        if is_group and get_origin(kind) is None and not get_args(kind) and field_path not in NAMED_AS_A_WHOLE:
            yield from leaves(kind, field_path)
        else:
            yield field_path


def objects_without_revision(service: InferenceService) -> str:
    """The revision follows every field of the pod-shaping spec, acted on or not, so it proves nothing here."""
    return json.dumps(desired_objects(service, SETTINGS)).replace(revision_of(service), "")


def test_every_field_has_a_change_here() -> None:
    assert set(leaves(ServiceSpec, "")) == set(CHANGES)


@pytest.mark.parametrize("path", CHANGES)
def test_setting_a_field_changes_an_object_or_is_reported(make_service: MakeService, path: str) -> None:
    before, after = (make_service(**spec) for spec in CHANGES[path])
    reported = {feature.field_path for feature in unsupported_features(after)}

    assert objects_without_revision(after) != objects_without_revision(before) or f"spec.{path}" in reported


def test_a_manifest_that_asks_for_nothing_unsupported_reports_nothing(make_service: MakeService) -> None:
    assert unsupported_features(make_service()) == []
