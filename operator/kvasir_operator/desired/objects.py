"""The full set of children of one service: those that all revisions share, and the current revision's workloads.

A child is changed in its builder under resources/; here is only which children there are. Workloads of former revisions
are not among them: they stay as they were made until rollout/ lets them go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_operator.api.labels import REVISION_NUMBER, workload_name
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.revision import revision_of
from kvasir_operator.desired.roles import EngineRole, Role, engine_roles, router_roles
from kvasir_operator.desired.unsupported import UnsupportedFeature, blocking, unsupported_features
from kvasir_operator.kube.kinds import DEPLOYMENT, SERVICE, ObjectKey, object_key
from kvasir_operator.resources.engine_deployment import engine_deployment
from kvasir_operator.resources.engine_service import engine_service
from kvasir_operator.resources.network_policies import network_policies
from kvasir_operator.resources.pod_disruption_budget import pod_disruption_budget
from kvasir_operator.resources.pod_monitor import pod_monitor
from kvasir_operator.resources.router_access import router_role_binding
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret
from kvasir_operator.resources.router_service import router_service
from kvasir_operator.resources.service_accounts import engine_service_account, router_service_account
from kvasir_operator.settings import OperatorSettings

Manifest = dict[str, Any]


@dataclass(frozen=True)
class CurrentRevision:
    """What a rollout has decided for the current revision.

    number: order of use, for the history. replicas: by engine role. traffic_weight: per cent of the requests; None: its
    part by the router's policy.
    """

    name: str
    number: int
    replicas: Mapping[str, int]
    traffic_weight: int | None = None


@dataclass(frozen=True)
class DesiredService:
    """A service as its manifest and the installation want it; how many pods a revision has by now, a rollout says.

    shared: children that do not depend on a revision.
    """

    service: InferenceService
    settings: OperatorSettings
    roles: tuple[EngineRole, ...]
    revision: str
    unsupported: tuple[UnsupportedFeature, ...]
    shared: tuple[Manifest, ...]

    @property
    def keys(self) -> list[ObjectKey]:
        """Of every object that `objects` returns."""
        names = [workload_name(self.service.name, role.name, self.revision) for role in self.roles]
        return [
            *map(object_key, self.shared),
            *(ObjectKey(kind, name) for kind in (SERVICE, DEPLOYMENT) for name in names),
        ]

    @property
    def replicas(self) -> dict[str, int]:
        """Pods wanted by engine role, over all revisions."""
        return {role.name: role.replicas for role in self.roles}

    @property
    def blocked(self) -> str | None:
        """Why no engine may be started."""
        return "; ".join(map(str, blocking(self.unsupported))) or None

    def objects(self, current: CurrentRevision) -> list[Manifest]:
        """In the order in which they are applied. A revision's Service has its weight before there are pods."""
        service, settings = self.service, self.settings
        services = [engine_service(service, role, current.name, current.traffic_weight) for role in self.roles]
        return [*self.shared, *services, *(_workload(service, role, settings, current) for role in self.roles)]


def desired_service(
    service: InferenceService,
    settings: OperatorSettings,
    server_version: tuple[int, int] | None = None,
    with_pod_monitors: bool = False,
) -> DesiredService:
    """`server_version` (major, minor) and `with_pod_monitors`, whether the kind is served, are the cluster's.

    Raises UnknownProfileError for a profile that the installation lacks.
    """
    roles = engine_roles(service, settings.defaults)
    return DesiredService(
        service,
        settings,
        roles,
        revision_of(service, roles, settings),
        tuple(unsupported_features(service, server_version, has_gateway=settings.defaults.gateway is not None)),
        tuple(_shared(service, roles, settings, with_pod_monitors)),
    )


def desired_objects(service: InferenceService, settings: OperatorSettings) -> list[Manifest]:
    """All children as a cluster without any of them gets them, in the order in which they are applied."""
    wanted = desired_service(service, settings)
    replicas = {role: 0 if wanted.blocked else number for role, number in wanted.replicas.items()}
    return wanted.objects(CurrentRevision(wanted.revision, 1, replicas))


def _shared(
    service: InferenceService, roles: Sequence[EngineRole], settings: OperatorSettings, with_pod_monitors: bool
) -> list[Manifest]:
    routers = router_roles(service, settings.defaults)
    all_roles: tuple[Role, ...] = (*roles, *routers)
    children = [
        router_secret(service, settings),
        engine_service_account(service, roles),
        *(router_service_account(service, router) for router in routers),
        *(router_role_binding(service, router, settings) for router in routers),
        *(router_service(service) for _ in routers),
        *network_policies(service, settings),
        *(pod_disruption_budget(service, role) for role in all_roles),
        *(pod_monitor(service, role, settings) for role in all_roles if with_pod_monitors),
        *(router_deployment(service, router, settings) for router in routers),
    ]
    return [child for child in children if child is not None]


def _workload(
    service: InferenceService, role: EngineRole, settings: OperatorSettings, current: CurrentRevision
) -> Manifest:
    deployment = engine_deployment(service, role, current.name, current.replicas[role.name], settings)
    annotations = {**deployment["metadata"].get("annotations", {}), REVISION_NUMBER: str(current.number)}
    return {**deployment, "metadata": {**deployment["metadata"], "annotations": annotations}}
