"""Rules across the groups of a service: its name, its roles, and what a role may say that the service says too."""

import re
from typing import Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import (
    NO_ACCELERATOR,
    DisaggregatedRole,
    EngineOverrides,
    EngineSpec,
    InferenceService,
    ParallelismSpec,
    ResourcesSpec,
    ServiceSpec,
)
from kvasir_operator.api.rule import Rule, num_set

_SERVICE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_ON_CPUS_CEL = f"{{0}}.accelerator == '{NO_ACCELERATOR}'"
_WITH_DEVICES_CEL = f"({{0}}.accelerator != '{NO_ACCELERATOR}' || (has({{0}}.claims) && {{0}}.claims.size() > 0))"
_XOR_MESSAGE = "write replicas or autoscaling, not both: an autoscaled role owns its own replica count"
# What `kubectl scale` or another field manager has left stands, and counts no more (parse.py): who writes autoscaling
# or disaggregation then could not take it away.
_STAYS_CEL = "(oldSelf.hasValue() && has(oldSelf.value().replicas) && oldSelf.value().replicas == self.replicas)"
STEP_MESSAGE = (
    "maxNumBatchedTokens is below maxNumSeqs: each running request needs one token of a step, so raise it or lower "
    "maxNumSeqs"
)


def _name_fits(service: InferenceService) -> bool:
    return len(service.name) <= labels.MAX_NAME_LENGTH and re.fullmatch(_SERVICE_NAME, service.name) is not None


def _roles(spec: ServiceSpec) -> list[DisaggregatedRole]:
    return [spec.disaggregation.prefill, spec.disaggregation.decode] if spec.disaggregation else []


def _resources(spec: ServiceSpec) -> list[ResourcesSpec]:
    """Those that are written: the service's, or its roles'."""
    written = (spec.resources, *(role.resources for role in _roles(spec)))
    return [resources for resources in written if resources is not None]


def _all_resources(check: str) -> str:
    """CEL: `check` holds of `{0}.accelerator` wherever the manifest names one, `{0}` being its resources."""
    checks = [
        f"(!has({owner}.resources) || !has({owner}.resources.accelerator) || {check.format(f'{owner}.resources')})"
        for owner in ("self", "self.disaggregation.prefill", "self.disaggregation.decode")
    ]
    return f"{checks[0]} && (!has(self.disaggregation) || ({checks[1]} && {checks[2]}))"


def _steps_fit(engine: EngineSpec, overrides: EngineOverrides | None) -> bool:
    """Of a role's engine: the token budget of a step has room for a token of each request."""
    own = overrides or EngineOverrides()
    num_tokens = own.max_num_batched_tokens or engine.max_num_batched_tokens
    return num_tokens is None or num_tokens >= (own.max_num_seqs or engine.max_num_seqs)


def _steps_fit_cel(role: str) -> str:
    def effective(key: str, otherwise: str) -> str:
        return f"(has({role}.engine) && has({role}.engine.{key}) ? {role}.engine.{key} : {otherwise})"

    most = 2**31
    tokens = effective(
        "maxNumBatchedTokens",
        f"(has(self.engine.maxNumBatchedTokens) ? self.engine.maxNumBatchedTokens : {most})",
    )
    return f"{tokens} >= {effective('maxNumSeqs', 'self.engine.maxNumSeqs')}"


def _fits_pods(parallelism: ParallelismSpec, resources: ResourcesSpec | None) -> bool:
    """A pod has whole copies, or as many tensor ranks of one as each other pod."""
    most = None if resources is None else resources.max_devices
    return most is None or parallelism.tensor <= most or parallelism.tensor % most == 0


PLACEMENT_RULE: Final = Rule(
    "tensor is above resources.maxDevices, the most devices of a pod: for a group of pods write a multiple of it",
    lambda role: _fits_pods(role.parallelism, role.resources),
    "!has(self.resources) || !has(self.resources.maxDevices) || "
    "self.parallelism.tensor <= self.resources.maxDevices || "
    "self.parallelism.tensor % self.resources.maxDevices == 0",
)
"""Of what has parallelism and resources: the service, a role of the manifest, and a role with its profile."""
CPU_RULE: Final = Rule(
    "cpu, which a node must have free, is above cpuLimit, the most that is used of it: lower cpu or raise cpuLimit",
    lambda r: r.cpu is None or r.cpu_limit is None or r.cpu.amount <= r.cpu_limit.amount,
    "!has(self.cpu) || !has(self.cpuLimit) || "
    "!quantity(string(self.cpu)).isGreaterThan(quantity(string(self.cpuLimit)))",
)
"""Of resources: an engine's and a router's, in a manifest, and with the installation's."""
SERVICE_RULES: Final = (
    Rule(
        f"metadata.name becomes part of Service names: write at most {labels.MAX_NAME_LENGTH} of a-z, 0-9 and -, "
        "first a letter, last no -",
        _name_fits,
        f"self.metadata.name.size() <= {labels.MAX_NAME_LENGTH} && self.metadata.name.matches('{_SERVICE_NAME}')",
    ),
    Rule(
        "spec.model.aliases repeats the name that the model already has: leave it out",
        lambda s: s.model_names[0] not in s.spec.model.aliases,
        "!has(self.spec.model.aliases) || !self.spec.model.aliases.exists(alias, alias == "
        "(has(self.spec.model.name) ? self.spec.model.name : self.metadata.name))",
    ),
)
SPEC_RULES: Final = (
    # The scale subresource needs spec.replicas, so that the schema fills 1 in: it cannot be told from a written 1.
    Rule(
        _XOR_MESSAGE,
        lambda s: s.autoscaling is None or s.replicas == 1,
        f"!has(self.autoscaling) || self.replicas == 1 || {_STAYS_CEL}",
    ),
    Rule(
        "with disaggregation, write replicas, autoscaling and resources under disaggregation.prefill and "
        "disaggregation.decode",
        lambda s: s.disaggregation is None or (s.replicas == 1 and num_set(s, "autoscaling", "resources") == 0),
        f"!has(self.disaggregation) || ((self.replicas == 1 || {_STAYS_CEL}) && !has(self.autoscaling) && "
        "!has(self.resources))",
    ),
    Rule(
        "with disaggregation, write parallelism under disaggregation.prefill and disaggregation.decode",
        lambda s: s.disaggregation is None or s.parallelism == ParallelismSpec(),
        "!has(self.disaggregation) || (self.parallelism.tensor == 1 && self.parallelism.pipeline == 1 && "
        "self.parallelism.data == 1 && !self.parallelism.expert)",
    ),
    Rule(
        "engine.device is cpu: write resources.accelerator: none, or leave it out",
        lambda s: s.engine.device != "cpu" or all(r.accelerator in (None, NO_ACCELERATOR) for r in _resources(s)),
        f"self.engine.device != 'cpu' || ({_all_resources(_ON_CPUS_CEL)})",
    ),
    Rule(
        "engine.device is cuda: name the accelerator's resource in resources.accelerator, leave it out for "
        "nvidia.com/gpu, or write resources.claims for devices",
        lambda s: s.engine.device != "cuda" or all(r.accelerator != NO_ACCELERATOR or r.claims for r in _resources(s)),
        f"self.engine.device != 'cuda' || ({_all_resources(_WITH_DEVICES_CEL)})",
    ),
    Rule(
        f"of a role's engine over spec.engine, {STEP_MESSAGE}",
        lambda s: all(_steps_fit(s.engine, role.engine) for role in _roles(s)),
        f"!has(self.disaggregation) || ({_steps_fit_cel('self.disaggregation.prefill')} && "
        f"{_steps_fit_cel('self.disaggregation.decode')})",
    ),
    PLACEMENT_RULE,
)
ROLE_RULES: Final = (
    Rule(
        _XOR_MESSAGE,
        lambda role: num_set(role, "replicas", "autoscaling") < 2,
        f"!(has(self.replicas) && has(self.autoscaling)) || {_STAYS_CEL}",
    ),
    PLACEMENT_RULE,
)
