"""The full set of children of one service: those that all revisions share, and the current revision's workloads.

A child is changed in its builder under resources/; here is only which children there are. Workloads of former revisions
are not among them: they stay as they were made until rollout/ lets them go, and what else their pods need can be made
again without the spec of theirs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvasir_operator.api.labels import (
    REVISION_LABEL,
    REVISION_NUMBER,
    ROLE_LABEL,
    engine_name,
    workload_name,
)
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import NOT_SCALED, EngineRole, Role, engine_roles, router_roles
from kvasir_operator.desired.unsupported import UnsupportedFeature, blocking, unsupported_features
from kvasir_operator.groups.group import WantedGroup
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    GROUP_KINDS,
    SERVICE,
    STATEFUL_SET,
    Kind,
    KubeObject,
    ObjectKey,
    object_key,
    pod_template,
)
from kvasir_operator.resources.engine_deployment import engine_deployment, engine_pod_template
from kvasir_operator.resources.engine_group import GROUP_NAMES, engine_group
from kvasir_operator.resources.network_policies import network_policies
from kvasir_operator.resources.pod_disruption_budget import pod_disruption_budget
from kvasir_operator.resources.pod_monitor import pod_monitor
from kvasir_operator.resources.router_deployment import router_deployment
from kvasir_operator.resources.router_secret import router_secret
from kvasir_operator.resources.service_accounts import (
    engine_service_account,
    own_engine_service_account,
    router_role_binding,
    router_service_account,
)
from kvasir_operator.resources.services import engine_service, rendezvous_service, router_peers_service, router_service
from kvasir_operator.settings import OperatorSettings

Manifest = dict[str, Any]
_REVISION_LENGTH: Final = 10  # hex digits


@dataclass(frozen=True)
class CurrentRevision:
    """What a rollout has decided for the current revision.

    number: order of use, for the history. replicas: by engine role. traffic_weight: per cent of the requests; None: its
    part by the router's policy. groups: which ones, by role whose replicas are groups; of a role that is not there the
    first ones.
    """

    name: str
    number: int
    replicas: Mapping[str, int]
    traffic_weight: int | None = None
    groups: Mapping[str, Sequence[WantedGroup]] = field(default_factory=dict)

    def groups_of(self, role: str) -> Sequence[WantedGroup]:
        return self.groups.get(role, [WantedGroup(index) for index in range(self.replicas[role])])


@dataclass(frozen=True)
class DesiredService:
    """A service as its manifest and the installation want it; how many pods a revision has by now, a rollout says.

    shared: children that do not depend on a revision. group_kind: what groups are made as, of a revision that has none.
    """

    service: InferenceService
    settings: OperatorSettings
    roles: tuple[EngineRole, ...]
    revision: str
    unsupported: tuple[UnsupportedFeature, ...]
    shared: tuple[Manifest, ...]
    group_kind: Kind = STATEFUL_SET

    @property
    def keys(self) -> list[ObjectKey]:
        """Of every object that `objects` returns for a service that has none of them yet."""
        return [*map(object_key, self.shared), *(key for role in self.roles for key in self._keys_of(role))]

    def _keys_of(self, role: EngineRole) -> list[ObjectKey]:
        name = workload_name(self.service.name, role.name, self.revision)
        if not role.is_grouped:
            return [ObjectKey(SERVICE, name), ObjectKey(DEPLOYMENT, name)]
        name_of = GROUP_NAMES[self.group_kind]
        groups = (name_of(self.service.name, role.name, self.revision, index) for index in range(role.replicas))
        return [ObjectKey(SERVICE, name), *(ObjectKey(self.group_kind, group) for group in groups)]

    @property
    def replicas(self) -> dict[str, int]:
        """Pods, or groups of them, wanted by engine role, over all revisions."""
        return {role.name: role.replicas for role in self.roles}

    @property
    def is_autoscaled(self) -> bool:
        """And there is a Prometheus by which to do it."""
        return self.settings.prometheus_url is not None and any(role.autoscaling is not None for role in self.roles)

    @property
    def blocked(self) -> str | None:
        """Why no engine may be started."""
        return "; ".join(map(str, blocking(self.unsupported))) or None

    def objects(self, current: CurrentRevision) -> list[Manifest]:
        """In the order in which they are applied, but that a new workload comes before its Service (apply/plan.py)."""
        return [*self.shared, *self._revised(current)]

    def _revised(self, current: CurrentRevision) -> list[Manifest]:
        service, settings = self.service, self.settings
        services = [
            engine_service(service, role.name, current.name, current.traffic_weight, is_grouped=role.is_grouped)
            for role in self.roles
        ]
        workloads = [each for role in self.roles for each in _workloads(service, role, settings, current)]
        return [*services, *workloads]


def desired_service(
    service: InferenceService,
    settings: OperatorSettings,
    with_pod_monitors: bool = False,
    scaled: Mapping[str, int] = NOT_SCALED,
    group_kind: Kind = STATEFUL_SET,
) -> DesiredService:
    """`scaled`: replicas decided for autoscaled roles, by name. `with_pod_monitors`: the cluster serves the kind.
    `group_kind`: the best that it serves.

    Raises InvalidManifestError for what does not fit the installation's profiles.
    """
    roles = engine_roles(service, settings.defaults, scaled if settings.prometheus_url else NOT_SCALED)
    return DesiredService(
        service,
        settings,
        roles,
        revision_of(service, roles, settings),
        tuple(
            unsupported_features(
                service,
                has_gateway=settings.defaults.gateway is not None,
                has_prometheus=settings.prometheus_url is not None,
                roles=roles,
            )
        ),
        tuple(_shared(service, roles, settings, with_pod_monitors)),
        group_kind,
    )


def revision_of(service: InferenceService, roles: Iterable[EngineRole], settings: OperatorSettings) -> str:
    """A short name for everything that shapes a service's engine pods, of all roles, which so share one revision.

    Pods of different revisions never exchange KV blocks, so what changes a pod must change it, and what only changes
    how many there are, or the router, must not: a new revision restarts every engine. It is taken from the pods'
    templates themselves, so an image or a rule of the operator's own counts like a field of the manifest.
    """
    templates = {role.name: engine_pod_template(service, role, settings) for role in roles}
    text = json.dumps(templates, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_REVISION_LENGTH]


def children_of_former(service: InferenceService, workload: KubeObject) -> list[Manifest]:
    """What pods of a former revision need beside their workload, by its template; some is the current one's too."""
    kind, template = object_key(workload).kind, pod_template(workload)
    role, revision = (template["metadata"]["labels"][label] for label in (ROLE_LABEL, REVISION_LABEL))
    children = [engine_service(service, role, revision, None, is_grouped=kind in GROUP_KINDS)]
    if kind == STATEFUL_SET:
        children.append(rendezvous_service(service, role))
    if template["spec"].get("serviceAccountName") == engine_name(service.name):
        children.append(own_engine_service_account(service))
    return children


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
        *(router_peers_service(service) for _ in routers),
        *(rendezvous_service(service, role.name) for role in roles if role.is_grouped),
        *network_policies(service, settings),
        *(pod_disruption_budget(service, role) for role in all_roles),
        *(pod_monitor(service, role, settings) for role in all_roles if with_pod_monitors),
        *(router_deployment(service, router, settings) for router in routers),
    ]
    return [child for child in children if child is not None]


def _workloads(
    service: InferenceService, role: EngineRole, settings: OperatorSettings, current: CurrentRevision
) -> list[Manifest]:
    """One Deployment, or an object a group."""
    if role.is_grouped:
        groups = current.groups_of(role.name)
        workloads = [engine_group(service, role, current.name, group, settings) for group in groups]
    else:
        workloads = [engine_deployment(service, role, current.name, current.replicas[role.name], settings)]
    return [_numbered(workload, current.number) for workload in workloads]


def _numbered(workload: Manifest, number: int) -> Manifest:
    annotations = {**workload["metadata"].get("annotations", {}), REVISION_NUMBER: str(number)}
    return {**workload, "metadata": {**workload["metadata"], "annotations": annotations}}
