"""All rules across fields, by the manifest's group that each belongs to.

The API server evaluates the CEL text, which goes into the CRD; `parse` evaluates the Python. tests/controlplane has
both refuse the same manifests. A message says what to write instead.
"""

import re
from collections.abc import Mapping
from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import (
    AutoscalingSpec,
    DisaggregatedRole,
    EngineOverrides,
    EngineSpec,
    EnvSource,
    EnvVar,
    InferenceService,
    ModelCache,
    ParallelismSpec,
    PodSpec,
    PodVolume,
    ResourceClaim,
    ResourcesSpec,
    RolloutSpec,
    RouterResources,
    RouterService,
    RouterSpec,
    ServiceSpec,
    SpeculativeSpec,
    Toleration,
)
from kvasir_operator.api.rule import Rule, exactly_one, num_set
from kvasir_operator.api.service_rules import CPU_RULE, ROLE_RULES, SERVICE_RULES, SPEC_RULES, STEP_MESSAGE
from kvasir_operator.api.source import (
    PARENT_MESSAGE,
    SOURCE_MESSAGE,
    SOURCE_PATTERN,
    ModelSource,
    has_no_parent,
    is_source,
)

# Flags that follow from other fields of the manifest; a second one in `args` would silently win.
RESERVED_ARGS: Final = (
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
)
# Resources outside a vendor's domain that a pod can ask for, besides cpu and memory.
_EXTRA_RESOURCE = r"^([a-z0-9.-]+/[A-Za-z0-9._-]+|hugepages-[A-Za-z0-9]+|ephemeral-storage)$"
_RESERVED_ARG = rf"^--({'|'.join(arg.removeprefix('--') for arg in RESERVED_ARGS)})(=.*)?$"
_WHOLE_PROMPTS = "--no-enable-chunked-prefill"
_MOST = 2**31  # tokens
_ZERO_PODS = r"^0+%?$"
# Folders of the containers that Kvasir mounts itself, and paths that name one of them in another way.
_OWN_FOLDER = r"^(/(tmp|dev/shm)?|/(model-cache|models|draft-models|etc/kvasir)(/.*)?|.*/(/.*|\.(/.*)?|\.\.(/.*)?)?)$"
# Methods of speculative decoding that draft without a model.
_WITHOUT_MODEL = ("ngram", "suffix")


def rules_of(cls: type) -> tuple[Rule, ...]:
    """The rules of one manifest dataclass."""
    return _RULES.get(cls, ())


def _is_zero(num_pods: int | str) -> bool:
    return re.fullmatch(_ZERO_PODS, str(num_pods)) is not None


def _describes_pods(router: RouterSpec) -> bool:
    """Says something of pods, or of their Service, that only a router of the service's own has."""
    is_default = (router.pod, router.service, router.resources) == (PodSpec(), RouterService(), RouterResources())
    return router.replicas is not None or not is_default


_ARGS = Rule(
    "args holds a flag that the manifest's own fields set: write the field of engine, parallelism, model or rollout, "
    "and leave --host and --port out",
    lambda engine: not any(re.fullmatch(_RESERVED_ARG, arg, re.DOTALL) for arg in engine.args),
    f"!has(self.args) || !self.args.exists(arg, arg.matches('(?s){_RESERVED_ARG}'))",
)

_RULES: Mapping[type, tuple[Rule, ...]] = {
    InferenceService: SERVICE_RULES,
    ServiceSpec: SPEC_RULES,
    DisaggregatedRole: ROLE_RULES,
    ModelSource: (
        Rule(SOURCE_MESSAGE, lambda source: is_source(source.text), f"self.matches(r'{SOURCE_PATTERN}')"),
        Rule(
            PARENT_MESSAGE,
            lambda source: has_no_parent(source.text),
            "!self.split('/').exists(part, part == '..')",
        ),
    ),
    ModelCache: (exactly_one(ModelCache, "claim", "host_path", "size_limit"),),
    EngineSpec: (
        Rule(
            STEP_MESSAGE,
            lambda e: e.max_num_batched_tokens is None or e.max_num_batched_tokens >= e.max_num_seqs,
            "!has(self.maxNumBatchedTokens) || self.maxNumBatchedTokens >= self.maxNumSeqs",
        ),
        Rule(
            f"maxNumBatchedTokens is below maxModelLen, and args has {_WHOLE_PROMPTS}, so a long prompt would never "
            "fit into a step: raise it, lower maxModelLen, or leave the flag out",
            lambda e: _WHOLE_PROMPTS not in e.args or (e.max_num_batched_tokens or _MOST) >= (e.max_model_len or 0),
            f"!has(self.args) || !('{_WHOLE_PROMPTS}' in self.args) || !has(self.maxNumBatchedTokens) || "
            "!has(self.maxModelLen) || self.maxNumBatchedTokens >= self.maxModelLen",
        ),
        _ARGS,
    ),
    EngineOverrides: (_ARGS,),
    SpeculativeSpec: (
        Rule(
            "methods ngram and suffix draft from text seen before: leave model out",
            lambda s: s.method not in _WITHOUT_MODEL or s.model is None,
            f"!(self.method in {list(_WITHOUT_MODEL)}) || !has(self.model)",
        ),
        Rule(
            "this method drafts with a model of its own: write model",
            lambda s: s.method in _WITHOUT_MODEL or s.model is not None,
            f"self.method in {list(_WITHOUT_MODEL)} || has(self.model)",
        ),
    ),
    ResourcesSpec: (
        Rule(
            "extra names a resource that no node has: write VENDOR/NAME, hugepages-SIZE or ephemeral-storage, and cpu, "
            "memory and the accelerator in their own fields",
            lambda r: all(re.fullmatch(_EXTRA_RESOURCE, key) for key in r.extra),
            f"!has(self.extra) || self.extra.all(key, key.matches('{_EXTRA_RESOURCE}'))",
        ),
        CPU_RULE,
    ),
    RouterResources: (CPU_RULE,),
    ParallelismSpec: (
        Rule(
            "expert shares out experts among tensor ranks, of which there is one: raise tensor, or leave expert out",
            lambda p: not p.expert or p.tensor > 1,
            # The API server checks the group's default, which is empty, before it fills the degrees in.
            "!has(self.expert) || !self.expert || (has(self.tensor) && self.tensor > 1)",
        ),
    ),
    ResourceClaim: (exactly_one(ResourceClaim, "resource_claim_name", "resource_claim_template_name"),),
    Toleration: (
        Rule(
            "operator Exists takes no value, no key needs Exists, and tolerationSeconds needs effect NoExecute",
            lambda t: (
                not (t.operator == "Exists" and t.value)
                and (bool(t.key) or t.operator == "Exists")
                and (t.toleration_seconds is None or t.effect == "NoExecute")
            ),
            "(self.operator != 'Exists' || !has(self.value) || self.value == '') && "
            "(self.operator == 'Exists' || (has(self.key) && self.key != '')) && "
            "(!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute'))",
        ),
    ),
    EnvVar: (
        Rule(
            "write value or valueFrom, not both",
            lambda v: num_set(v, "value", "value_from") < 2,
            "!(has(self.value) && has(self.valueFrom))",
        ),
        Rule(
            f"{labels.ROUTER_SECRET_ENV} is the operator's, and the router has the same: leave it out",
            lambda v: v.name != labels.ROUTER_SECRET_ENV,
            f"self.name != '{labels.ROUTER_SECRET_ENV}'",
        ),
    ),
    EnvSource: (exactly_one(EnvSource, "secret_key_ref", "config_map_key_ref", "field_ref"),),
    PodVolume: (
        exactly_one(PodVolume, "config_map", "secret", "claim"),
        Rule(
            "mountPath is a folder that Kvasir mounts itself (/tmp, /dev/shm, /model-cache, /models, /draft-models, "
            "/etc/kvasir), or has empty parts, . or .. in it: choose another, written plainly",
            lambda v: re.fullmatch(_OWN_FOLDER, v.mount_path) is None,
            f"!self.mountPath.matches(r'{_OWN_FOLDER}')",
        ),
    ),
    PodSpec: (
        Rule(
            f"labels under {labels.GROUP}/ are the operator's: choose other keys",
            lambda pod: not any(key.startswith(f"{labels.GROUP}/") for key in pod.labels),
            f"!has(self.labels) || !self.labels.exists(key, key.startsWith('{labels.GROUP}/'))",
        ),
    ),
    AutoscalingSpec: (
        Rule(
            "minReplicas is above maxReplicas: lower it or raise maxReplicas",
            lambda a: a.min_replicas <= a.max_replicas,
            "self.minReplicas <= self.maxReplicas",
        ),
    ),
    RouterSpec: (
        Rule(
            "mode gateway is served by the chart's shared router: leave router.replicas, router.pod, router.service "
            "and router.resources out",
            lambda r: r.mode != "gateway" or not _describes_pods(r),
            "!has(self.mode) || self.mode != 'gateway' || (!has(self.replicas) && "
            "(!has(self.pod) || dyn(self.pod) == {}) && self.service.type == 'ClusterIP' && "
            "(!has(self.service.annotations) || self.service.annotations.size() == 0) && "
            "(!has(self.resources) || dyn(self.resources) == {}))",
        ),
        Rule(
            "mode gateway asks for the API keys of the chart's shared router: leave router.apiKeysSecretRef and "
            "router.tenantLimits out, and set the chart's gateway.apiKeysSecret and gateway.tenantLimits",
            lambda r: r.mode != "gateway" or num_set(r, "api_keys_secret_ref", "tenant_limits") == 0,
            "!has(self.mode) || self.mode != 'gateway' || (!has(self.apiKeysSecretRef) && !has(self.tenantLimits))",
        ),
        Rule(
            "tenantLimits are limits to each tenant, and tenants are told apart by their API keys: write "
            "router.apiKeysSecretRef too",
            lambda r: r.mode == "gateway" or r.tenant_limits is None or r.api_keys_secret_ref is not None,
            "(has(self.mode) && self.mode == 'gateway') || !has(self.tenantLimits) || has(self.apiKeysSecretRef)",
        ),
    ),
    RolloutSpec: (
        Rule(
            "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: raise one of them",
            lambda r: not (_is_zero(r.max_surge) and _is_zero(r.max_unavailable)),
            "!has(self.maxSurge) || !has(self.maxUnavailable) || "
            f"!string(self.maxSurge).matches('{_ZERO_PODS}') || !string(self.maxUnavailable).matches('{_ZERO_PODS}')",
        ),
    ),
}
