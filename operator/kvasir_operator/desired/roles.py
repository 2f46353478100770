"""The roles of a service: each kind of pod with everything that its builders need to know of the manifest.

Builders, status, scale-down, plan and disruption budgets take a role; none reads the manifest's own groups, whose
settings may stand once for the service, in a profile, or in a role's own overrides.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvasir_operator.api.defaults import InstallationDefaults, PodDefaults, overlaid
from kvasir_operator.api.model import (
    AutoscalingSpec,
    DisaggregatedRole,
    EngineOverrides,
    EngineSpec,
    InferenceService,
    ParallelismSpec,
    PodSpec,
    ResourcesSpec,
    RouterResources,
    ServiceSpec,
)
from kvasir_operator.api.quantity import Quantity, at_most
from kvasir_operator.api.service_rules import CPU_RULE, PLACEMENT_RULE
from kvasir_operator.errors import InvalidManifestError, UnknownProfileError

EngineRoleName = Literal["serve", "prefill", "decode"]
DEFAULT_ROUTER_REPLICAS = 2
NOT_SCALED: Mapping[str, int] = MappingProxyType({})
_ROUTER_CPU = Quantity("250m")  # not limited: a busy router takes what its node has to spare
_ROUTER_MEMORY = Quantity("512Mi")


@dataclass(frozen=True)
class EngineRole:
    """Pods that hold the model and compute. `replicas`: pods, or groups of them, wanted now, over all revisions."""

    name: EngineRoleName
    replicas: int
    engine: EngineSpec
    parallelism: ParallelismSpec
    resources: ResourcesSpec
    pod: PodSpec
    autoscaling: AutoscalingSpec | None = None

    @property
    def tensor_ranks_per_pod(self) -> int:
        return min(self.parallelism.tensor, self.resources.max_devices or self.parallelism.tensor)

    @property
    def copies_per_pod(self) -> int:
        """Of the model, of which a pod has ranks: as many in each pod."""
        copies = self.parallelism.data
        room = (self.resources.max_devices or self.parallelism.tensor * copies) // self.tensor_ranks_per_pod
        return max(number for number in range(1, copies + 1) if copies % number == 0 and number <= room)

    @property
    def ranks_per_pod(self) -> int:
        return self.tensor_ranks_per_pod * self.copies_per_pod

    @property
    def num_nodes(self) -> int:
        """Pods of one replica, each with ranks of one pipeline stage."""
        degrees = self.parallelism
        return degrees.pipeline * degrees.tensor * degrees.data // self.ranks_per_pod

    @property
    def is_grouped(self) -> bool:
        """Whether a replica is a group of pods, which start and fail together."""
        return self.num_nodes > 1


@dataclass(frozen=True)
class RouterRole:
    """Pods that take clients' requests. `replicas`: pods wanted now."""

    replicas: int
    cpu: Quantity
    memory: Quantity
    cpu_limit: Quantity | None
    pod: PodSpec
    name: Literal["router"] = "router"
    is_grouped: Literal[False] = False


Role = EngineRole | RouterRole


def engine_roles(
    service: InferenceService, defaults: InstallationDefaults, scaled: Mapping[str, int] = NOT_SCALED
) -> tuple[EngineRole, ...]:
    """Serve; or prefill and decode. `scaled`: replicas decided for autoscaled roles, by name.

    Raises UnknownProfileError for a profile that the installation lacks, and InvalidManifestError for degrees that do
    not fit a profile's devices.
    """
    spec, split = service.spec, service.spec.disaggregation
    if split is not None:
        prefill = _disaggregated_role("prefill", split.prefill, spec, defaults, scaled.get("prefill"))
        decode = _disaggregated_role("decode", split.decode, spec, defaults, scaled.get("decode"))
        return (_placed(prefill, "spec.disaggregation.prefill"), _placed(decode, "spec.disaggregation.decode"))
    return (_placed(_serve_role(spec, defaults, scaled.get("serve")), "spec"),)


def router_roles(service: InferenceService, defaults: InstallationDefaults) -> tuple[RouterRole, ...]:
    """The service's own router; none behind the gateway."""
    return () if service.is_behind_gateway else (router_role(service, defaults),)


def router_role(service: InferenceService, defaults: InstallationDefaults) -> RouterRole:
    """A router of the service's own, as it is or would be."""
    router = service.spec.router
    replicas = DEFAULT_ROUTER_REPLICAS if router.replicas is None else router.replicas
    resources = overlaid(defaults.router.resources, router.resources)
    _check_cpu(resources, "spec.router.resources")
    return RouterRole(
        0 if service.spec.suspend else replicas,
        resources.cpu or at_most(_ROUTER_CPU, resources.cpu_limit),
        resources.memory or _ROUTER_MEMORY,
        resources.cpu_limit,
        overlaid(defaults.router.pod, router.pod),
    )


def _serve_role(spec: ServiceSpec, defaults: InstallationDefaults, scaled: int | None) -> EngineRole:
    resources = spec.resources or ResourcesSpec()
    profile = _profile(resources.profile, defaults)
    return EngineRole(
        "serve",
        _num_replicas(spec, spec.replicas, spec.autoscaling, scaled),
        spec.engine,
        spec.parallelism,
        overlaid(profile.resources, resources),
        overlaid(profile.pod, spec.pod),
        spec.autoscaling,
    )


def _disaggregated_role(
    name: EngineRoleName,
    role: DisaggregatedRole,
    spec: ServiceSpec,
    defaults: InstallationDefaults,
    scaled: int | None,
) -> EngineRole:
    resources = role.resources or ResourcesSpec()
    profile = _profile(resources.profile, defaults)
    return EngineRole(
        name,
        _num_replicas(spec, role.replicas, role.autoscaling, scaled),
        _overridden(spec.engine, role.engine or EngineOverrides()),
        role.parallelism,
        overlaid(profile.resources, resources),
        overlaid(overlaid(profile.pod, spec.pod), role.pod or PodSpec()),
        role.autoscaling,
    )


def _placed(role: EngineRole, field_path: str) -> EngineRole:
    """`role`, whose ranks fit into its pods. What the manifest alone says was checked when it was parsed."""
    if not PLACEMENT_RULE.holds(role):
        said = f"{role.resources.max_devices} by this installation's profile or podDefaults"
        raise InvalidManifestError(field_path, f"{PLACEMENT_RULE.message} (it is {said})")
    _check_cpu(role.resources, f"{field_path}.resources")
    return role


def _check_cpu(resources: ResourcesSpec | RouterResources, field_path: str) -> None:
    """Of which the installation may have given one."""
    cpu, limit = resources.cpu, resources.cpu_limit
    if cpu is not None and limit is not None and not CPU_RULE.holds(resources):
        said = f"cpu is {cpu.text} and cpuLimit {limit.text}, one of them by this installation's profile or podDefaults"
        raise InvalidManifestError(field_path, f"{CPU_RULE.message} ({said})")


def _num_replicas(
    spec: ServiceSpec, replicas: int | None, autoscaling: AutoscalingSpec | None, scaled: int | None
) -> int:
    """Until something is decided, an autoscaled role has one replica at least: it cannot wake before it has run."""
    if spec.suspend:
        return 0
    if autoscaling is not None and scaled is not None:
        return min(max(scaled, autoscaling.min_replicas), autoscaling.max_replicas)
    if autoscaling is not None:
        return max(1, autoscaling.min_replicas)
    return 1 if replicas is None else replicas


def _overridden(engine: EngineSpec, overrides: EngineOverrides) -> EngineSpec:
    given = {f.name: getattr(overrides, f.name) for f in dataclasses.fields(overrides) if f.name != "args"}
    said = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(engine, **said, args=(*engine.args, *overrides.args))


def _profile(name: str | None, defaults: InstallationDefaults) -> PodDefaults:
    """The named profile over the defaults of all engine pods."""
    if name is None:
        return defaults.engine
    if name not in defaults.profiles:
        raise UnknownProfileError(name, sorted(defaults.profiles))
    profile = defaults.profiles[name]
    return PodDefaults(
        overlaid(defaults.engine.pod, profile.pod), overlaid(defaults.engine.resources, profile.resources)
    )
