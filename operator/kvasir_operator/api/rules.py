"""Rules across fields of the manifest: the twin of the CRD's x-kubernetes-validations, with the same messages.

The API server evaluates the CEL text, `parse` evaluates these; tests/operator/api/test_drift.py compares the messages,
tests/controlplane that both refuse the same manifests. A message says what to write instead.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import (
    NO_ACCELERATOR,
    AutoscalingSpec,
    DisaggregatedRole,
    EngineSpec,
    EnvSource,
    EnvVar,
    InferenceService,
    ModelCache,
    ParallelismSpec,
    PodSpec,
    RolloutSpec,
    RouterSpec,
    ServiceSpec,
    SpeculativeSpec,
)

# Flags that follow from other fields of the manifest; a second one in `args` would silently win.
RESERVED_ARGS = ("--host", "--port", "--served-model-name", "--shutdown-timeout")
# Methods of speculative decoding that draft without a model.
_WITHOUT_MODEL = ("ngram", "suffix")


@dataclass(frozen=True)
class Rule:
    """`holds` gets the dataclass that the rule belongs to."""

    message: str
    holds: Callable[[Any], bool]


def rules_of(cls: type) -> tuple[Rule, ...]:
    """The rules of one manifest dataclass."""
    return _RULES.get(cls, ())


def _num_set(value: Any, *names: str) -> int:
    return sum(getattr(value, name) is not None for name in names)


def _name_fits(service: InferenceService) -> bool:
    is_label = re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service.name) is not None
    return is_label and len(service.name) <= labels.MAX_SERVICE_NAME_LENGTH


def _resources(spec: ServiceSpec) -> list[Any]:
    roles = [spec.disaggregation.prefill, spec.disaggregation.decode] if spec.disaggregation else []
    return [r for r in (spec.resources, *(role.resources for role in roles)) if r is not None]


def _cpu_has_no_accelerator(spec: ServiceSpec) -> bool:
    return spec.engine.device != "cpu" or all(r.accelerator in (None, NO_ACCELERATOR) for r in _resources(spec))


def _cuda_has_accelerator(spec: ServiceSpec) -> bool:
    return spec.engine.device != "cuda" or all(r.accelerator != NO_ACCELERATOR for r in _resources(spec))


def _is_reserved(arg: str) -> bool:
    return arg.partition("=")[0] in RESERVED_ARGS


def _has_no_own_labels(pod: PodSpec) -> bool:
    return not any(key.startswith(f"{labels.GROUP}/") for key in pod.labels)


_REPLICAS_XOR_AUTOSCALING = Rule(
    "write replicas or autoscaling, not both: an autoscaled role owns its own replica count",
    lambda s: _num_set(s, "replicas", "autoscaling") < 2,
)

_RULES: Mapping[type, tuple[Rule, ...]] = {
    InferenceService: (
        Rule(
            "metadata.name becomes part of Service names: write at most 52 of a-z, 0-9 and -, first a letter, "
            "last no -",
            _name_fits,
        ),
        Rule(
            "spec.model.aliases repeats the name that the model already has: leave it out",
            lambda s: s.model_names[0] not in s.spec.model.aliases,
        ),
    ),
    ServiceSpec: (
        _REPLICAS_XOR_AUTOSCALING,
        Rule(
            "with disaggregation, write replicas, autoscaling and resources under disaggregation.prefill and "
            "disaggregation.decode",
            lambda s: s.disaggregation is None or _num_set(s, "replicas", "autoscaling", "resources") == 0,
        ),
        Rule(
            "with disaggregation, write parallelism under disaggregation.prefill and disaggregation.decode",
            lambda s: s.disaggregation is None or s.parallelism == ParallelismSpec(),
        ),
        Rule(
            "engine.device is cpu: write resources.accelerator: none, or leave it out",
            _cpu_has_no_accelerator,
        ),
        Rule(
            "engine.device is cuda: name the accelerator's resource in resources.accelerator, or leave it out for "
            "nvidia.com/gpu",
            _cuda_has_accelerator,
        ),
    ),
    ModelCache: (
        Rule(
            "write exactly one of claim, hostPath and sizeLimit",
            lambda c: _num_set(c, "claim", "host_path", "size_limit") == 1,
        ),
    ),
    EngineSpec: (
        Rule(
            "maxNumBatchedTokens is below maxNumSeqs: each running request needs one token of a step, so raise it or "
            "lower maxNumSeqs",
            lambda e: e.max_num_batched_tokens is None or e.max_num_batched_tokens >= e.max_num_seqs,
        ),
        Rule(
            "args holds a flag that the operator sets: use router and rollout fields, model.name and model.aliases "
            "instead of --host, --port, --served-model-name and --shutdown-timeout",
            lambda e: not any(_is_reserved(arg) for arg in e.args),
        ),
    ),
    SpeculativeSpec: (
        Rule(
            "methods ngram and suffix draft from text seen before: leave model out",
            lambda s: s.method not in _WITHOUT_MODEL or s.model is None,
        ),
        Rule(
            "this method drafts with a model of its own: write model",
            lambda s: s.method in _WITHOUT_MODEL or s.model is not None,
        ),
    ),
    EnvVar: (
        Rule("write value or valueFrom, not both", lambda v: _num_set(v, "value", "value_from") < 2),
        Rule(
            f"{labels.ROUTER_SECRET_ENV} is the operator's, and the router has the same: leave it out",
            lambda v: v.name != labels.ROUTER_SECRET_ENV,
        ),
    ),
    EnvSource: (
        Rule(
            "write exactly one of secretKeyRef, configMapKeyRef and fieldRef",
            lambda s: _num_set(s, "secret_key_ref", "config_map_key_ref", "field_ref") == 1,
        ),
    ),
    PodSpec: (Rule("labels under serving.kvasir.dev/ are the operator's: choose other keys", _has_no_own_labels),),
    AutoscalingSpec: (
        Rule(
            "minReplicas is above maxReplicas: lower it or raise maxReplicas",
            lambda a: a.min_replicas <= a.max_replicas,
        ),
    ),
    DisaggregatedRole: (_REPLICAS_XOR_AUTOSCALING,),
    RouterSpec: (
        Rule(
            "mode gateway is served by the chart's shared router: leave router.replicas out",
            lambda r: r.mode != "gateway" or r.replicas is None,
        ),
    ),
    RolloutSpec: (
        Rule(
            "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: raise one of them",
            lambda r: not (r.max_surge in (0, "0%") and r.max_unavailable in (0, "0%")),
        ),
    ),
}
