"""Every field of the manifest does something: it changes a child object, a rollout reads it, or it is named as not
acted on."""

import ast
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from kvasir_operator import rollout
from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults
from kvasir_operator.api.fields import bare, manifest_fields
from kvasir_operator.api.model import InferenceService, ResourcesSpec, ServiceSpec
from kvasir_operator.api.quantity import Duration, Quantity
from kvasir_operator.api.source import ModelSource
from kvasir_operator.desired.objects import CurrentRevision, desired_service
from kvasir_operator.desired.unsupported import unsupported_features
from kvasir_operator.settings import OperatorSettings

MakeService = Callable[..., InferenceService]
PROFILE = PodDefaults(resources=ResourcesSpec(cpu=Quantity("20")))
SETTINGS = OperatorSettings(defaults=InstallationDefaults(profiles={"h100": PROFILE}))
AUTOSCALED = {"maxReplicas": 3}
DOWNLOADED = {"source": "hf://org/name"}
KEYS: dict[str, Any] = {"apiKeysSecretRef": {"name": "s"}}

# Of engine pods (spec.pod) and router pods (spec.router.pod) alike.
POD: dict[str, Any] = {
    "image": "mine:1",
    "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpread": "none",
    "priorityClassName": "high",
    "serviceAccountName": "mine",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "mirror"}],
    "securityContext": {"fsGroup": 1},
    "volumes": [{"mountPath": "/ca", "configMap": {"name": "ca"}}],
    "labels": {"a": "b"},
    "annotations": {"a": "b"},
    "env": [{"name": "A", "value": "1"}],
}
# Acted on while pods of one revision replace those of another, and so in no object of a service at rest.
READ_BY_ROLLOUTS = {
    "rollout.historyLimit": "history_limit",
    "rollout.canary.weight": "weight",
    "rollout.canary.pause": "pause",
}
# For each field, by its path: the spec's groups before, and the same with the field set to something else.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "model.source": ({"model": {"source": "file:///a"}}, {"model": {"source": "file:///b"}}),
    "model.name": ({}, {"model": {"source": "file:///models/llama", "name": "big"}}),
    "model.aliases": ({}, {"model": {"source": "file:///models/llama", "aliases": ["b"]}}),
    "model.secretRef": ({"model": DOWNLOADED}, {"model": DOWNLOADED | {"secretRef": {"name": "s"}}}),
    "model.cache.claim": ({"model": DOWNLOADED}, {"model": DOWNLOADED | {"cache": {"claim": "c"}}}),
    "model.cache.hostPath": ({"model": DOWNLOADED}, {"model": DOWNLOADED | {"cache": {"hostPath": "/c"}}}),
    "model.cache.sizeLimit": ({"model": DOWNLOADED}, {"model": DOWNLOADED | {"cache": {"sizeLimit": "1Gi"}}}),
    "engine.device": ({}, {"engine": {"device": "cpu"}}),
    "engine.dtype": ({}, {"engine": {"dtype": "float32"}}),
    "engine.quantization": ({}, {"engine": {"quantization": "int8"}}),
    "engine.maxModelLen": ({}, {"engine": {"maxModelLen": 512}}),
    "engine.maxNumSeqs": ({}, {"engine": {"maxNumSeqs": 8}}),
    "engine.maxNumBatchedTokens": ({}, {"engine": {"maxNumBatchedTokens": 512}}),
    "engine.memoryUtilization": ({}, {"engine": {"memoryUtilization": 0.5}}),
    "engine.scheduling": ({}, {"engine": {"scheduling": "fcfs"}}),
    "engine.kvTransfer": ({}, {"engine": {"kvTransfer": True}}),
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
    "parallelism.expert": ({"parallelism": {"tensor": 2}}, {"parallelism": {"tensor": 2, "expert": True}}),
    "resources.accelerator": ({}, {"resources": {"accelerator": "amd.com/gpu"}}),
    "resources.maxDevices": (
        {"parallelism": {"tensor": 2}},
        {"parallelism": {"tensor": 2}, "resources": {"maxDevices": 1}},
    ),
    "resources.cpu": ({}, {"resources": {"cpu": 1}}),
    "resources.cpuLimit": ({}, {"resources": {"cpuLimit": 2}}),
    "resources.memory": ({}, {"resources": {"memory": "1Gi"}}),
    "resources.sharedMemory": ({}, {"resources": {"sharedMemory": "1Gi"}}),
    "resources.profile": ({}, {"resources": {"profile": "h100"}}),
    "resources.extra": ({}, {"resources": {"extra": {"rdma/ib": 1}}}),
    "resources.claims": ({}, {"resources": {"claims": [{"name": "gpu", "resourceClaimName": "mine"}]}}),
    **{f"pod.{field}": ({}, {"pod": {field: value}}) for field, value in POD.items()},
    **{f"router.pod.{field}": ({}, {"router": {"pod": {field: value}}}) for field, value in POD.items()},
    "replicas": ({}, {"replicas": 2}),
    "autoscaling": ({}, {"autoscaling": AUTOSCALED}),
    "disaggregation.remotePrefillMinTokens": (
        {"disaggregation": {"prefill": {}, "decode": {}}},
        {"disaggregation": {"prefill": {}, "decode": {}, "remotePrefillMinTokens": 9}},
    ),
    "router.mode": ({}, {"router": {"mode": "gateway"}}),
    "router.replicas": ({}, {"router": {"replicas": 3}}),
    "router.policy": ({}, {"router": {"policy": "roundRobin"}}),
    "router.apiKeysSecretRef": ({}, {"router": {"apiKeysSecretRef": {"name": "s"}}}),
    "router.tenantLimits.tokensPerMinute": (
        {"router": KEYS},
        {"router": {**KEYS, "tenantLimits": {"tokensPerMinute": 9}}},
    ),
    "router.tenantLimits.maxInFlight": ({"router": KEYS}, {"router": {**KEYS, "tenantLimits": {"maxInFlight": 9}}}),
    "router.service.type": ({}, {"router": {"service": {"type": "NodePort"}}}),
    "router.service.annotations": ({}, {"router": {"service": {"annotations": {"a": "b"}}}}),
    "router.probes.timeoutSeconds": ({}, {"router": {"probes": {"timeoutSeconds": 4}}}),
    "router.probes.failureThreshold": ({}, {"router": {"probes": {"failureThreshold": 4}}}),
    "router.probes.hungAfterSeconds": ({}, {"router": {"probes": {"hungAfterSeconds": 4}}}),
    "router.maxQueueSize": ({}, {"router": {"maxQueueSize": 1}}),
    "router.maxQueueWait": ({}, {"router": {"maxQueueWait": "1s"}}),
    "router.sseKeepaliveInterval": ({}, {"router": {"sseKeepaliveInterval": "1s"}}),
    "router.resources.cpu": ({}, {"router": {"resources": {"cpu": 2}}}),
    "router.resources.cpuLimit": ({}, {"router": {"resources": {"cpuLimit": 2}}}),
    "router.resources.memory": ({}, {"router": {"resources": {"memory": "1Gi"}}}),
    "rollout.maxSurge": ({}, {"rollout": {"maxSurge": 2}}),
    "rollout.maxUnavailable": ({}, {"rollout": {"maxUnavailable": 1}}),
    "rollout.drainTimeout": ({}, {"rollout": {"drainTimeout": "1s"}}),
    "rollout.drainDelay": ({}, {"rollout": {"drainDelay": "1s"}}),
    "suspend": ({}, {"suspend": True}),
    "monitoring.podMonitor": ({}, {"monitoring": {"podMonitor": "none"}}),
}
# What is named as a whole needs no word about its parts.
NAMED_AS_A_WHOLE = ("model.secretRef", "engine.kvCache.disk", "engine.adapters")
NAMED_AS_A_WHOLE += ("autoscaling", "disaggregation.prefill.autoscaling", "disaggregation.decode.autoscaling")
NAMED_AS_A_WHOLE += ("router.apiKeysSecretRef",)
# What each of prefill and decode may say for itself, in the words of the service's own groups.
OF_A_ROLE = ("parallelism.", "resources.", "pod.")
OVERRIDDEN = ("maxNumSeqs", "maxNumBatchedTokens", "memoryUtilization", "scheduling", "args")
for ROLE in ("prefill", "decode"):
    OTHER = {"prefill": {}, "decode": {}}
    OWN = {path: after for path, (before, after) in CHANGES.items() if path.startswith(OF_A_ROLE)}
    OWN |= {f"engine.{field}": CHANGES[f"engine.{field}"][1] for field in OVERRIDDEN}
    OWN |= {"replicas": {"replicas": 2}, "autoscaling": {"autoscaling": AUTOSCALED}}
    CHANGES |= {
        f"disaggregation.{ROLE}.{path}": ({"disaggregation": OTHER}, {"disaggregation": {**OTHER, ROLE: change}})
        for path, change in OWN.items()
    }


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
    """With as many pods as the roles want. The revision follows from the pods, so it proves nothing besides."""
    wanted = desired_service(service, SETTINGS, with_pod_monitors=True)
    replicas = {role.name: role.replicas for role in wanted.roles}
    objects = wanted.objects(CurrentRevision(wanted.revision, 1, replicas))
    return json.dumps(objects).replace(wanted.revision, "")


def attributes_read(folder: Path) -> set[str]:
    """Names of all attributes that the modules of a folder read."""
    nodes = (node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_every_field_has_a_change_here() -> None:
    assert set(leaves(ServiceSpec, "")) == set(CHANGES) | set(READ_BY_ROLLOUTS)


@pytest.mark.parametrize("path", CHANGES)
def test_setting_a_field_changes_an_object_or_is_reported(make_service: MakeService, path: str) -> None:
    before, after = (make_service(**spec) for spec in CHANGES[path])
    reported = {feature.field_path for feature in unsupported_features(after)}

    assert objects_without_revision(after) != objects_without_revision(before) or f"spec.{path}" in reported


def test_rollouts_read_what_is_theirs() -> None:
    assert set(READ_BY_ROLLOUTS.values()) <= attributes_read(Path(rollout.__path__[0]))


def test_a_manifest_that_asks_for_nothing_unsupported_reports_nothing(make_service: MakeService) -> None:
    assert unsupported_features(make_service()) == []
