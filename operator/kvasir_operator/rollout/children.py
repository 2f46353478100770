"""What a rollout means for the children of former revisions: which are scaled, which stay, which are deleted.

Their workloads are not rendered again, so only `spec.replicas` of their Deployments and groups is ever written, and a
canary's weight taken off its Service. A Service stays while its workload has pods, and is made again where somebody
deletes it: routers find them by it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_ROUTER
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply.plan import Edit
from kvasir_operator.desired.objects import Manifest, children_of_former
from kvasir_operator.groups.group import chosen_indexes
from kvasir_operator.kube.kinds import SERVICE, KubeObject, ObjectKey, label_of, object_key
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.observed import ObservedWorkload
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.rollout.workload import Workload, WorkloadKey

_ANY_SPEC: Final = {"model": {"source": "pvc://any"}}
GoingGroups = Mapping[WorkloadKey, frozenset[str]]
"""Names of the groups with the least work, of workloads that shrink."""


def scales(
    plan: RolloutPlan, workloads: Iterable[ObservedWorkload], going_groups: GoingGroups = MappingProxyType({})
) -> tuple[Edit, ...]:
    """Of former workloads, those that shrink first: what they free may be needed."""
    former = [each for each in workloads if each.workload.key.revision != plan.revision]
    changes = [
        (wanted - each.workload.replicas, scale)
        for each in former
        if (wanted := plan.replicas.get(each.workload.key, each.workload.replicas)) != each.workload.replicas
        for scale in _scales(each, wanted, going_groups.get(each.workload.key, frozenset()))
    ]
    return tuple(scale for _, scale in sorted(changes, key=lambda change: change[0]))


def _scales(observed: ObservedWorkload, wanted: int, going: Collection[str]) -> Iterator[Edit]:
    if observed.deployment is not None:
        yield Edit.scale(observed.deployment, wanted)
        return
    groups = observed.groups
    running = chosen_indexes(groups, min(wanted, len(groups)), going, taken=())
    for group in groups:
        if group.is_running != (group.index in running):
            yield Edit.scale(group.obj, group.running_replicas if group.index in running else 0)


def weight_removals(
    plan: RolloutPlan, workloads: Iterable[ObservedWorkload], children: Iterable[KubeObject]
) -> tuple[Edit, ...]:
    """Services of canaries that were given up: the last of their pods could not carry what the weight says."""
    weighed = {
        each.service_name
        for each in workloads
        if each.workload.key.revision != plan.revision and each.workload.traffic_weight and not each.workload.is_idle
    }
    services = (child for child in children if object_key(child).kind == SERVICE)
    return tuple(Edit.without_weight(service) for service in services if service["metadata"]["name"] in weighed)


def needed_children(
    plan: RolloutPlan, workloads: Iterable[ObservedWorkload], service: InferenceService
) -> dict[ObjectKey, Manifest]:
    """What pods of former revisions need, as it would be made now."""
    former = (each for each in workloads if each.workload.key.revision != plan.revision)
    return _needed_by(service, (each for each in former if not _is_left_by_all(plan, each.workload)))


def needed_without_a_spec(service: KubeObject, workloads: Iterable[ObservedWorkload]) -> dict[ObjectKey, Manifest]:
    """The same of all pods, where the spec does not hold: nothing of it is in these children."""
    return _needed_by(parse_service({**service, "spec": _ANY_SPEC}), workloads)


def _needed_by(service: InferenceService, workloads: Iterable[ObservedWorkload]) -> dict[ObjectKey, Manifest]:
    held = (each for each in workloads if each.workload.num_held)
    return {object_key(child): child for each in held for child in children_of_former(service, each.objects[0])}


def kept_children(plan: RolloutPlan, workloads: Collection[ObservedWorkload]) -> frozenset[ObjectKey]:
    """Children of former revisions that nobody renders and nobody may delete yet."""
    staying = {
        key
        for each in workloads
        if each.workload.key not in plan.expired and each.workload.key.revision != plan.revision
        for key in each.keys
    }
    busy = {name for each in workloads if not _is_left_by_all(plan, each.workload) for name in each.service_names}
    return frozenset(staying | {ObjectKey(SERVICE, name) for name in busy})


def _is_left_by_all(plan: RolloutPlan, workload: Workload) -> bool:
    """No router finds a pod of it, now or later: at zero, a pod that has no node is gone without having had one."""
    return workload.is_idle or (plan.replicas.get(workload.key) == 0 and workload.has_only_unbound_pods)


def kept_router(plan: RolloutPlan, children: Iterable[KubeObject], *, is_replaced: bool) -> frozenset[ObjectKey]:
    """All objects of a router of the service's own, which the gateway is to replace.

    It goes once the gateway serves (`is_replaced`) and no engine is left that believes only it.
    """
    if is_replaced and plan.phase is RolloutPhase.COMPLETE:
        return frozenset()
    routers = (child for child in children if label_of(child, ROLE_LABEL) == ROLE_ROUTER)
    return frozenset(map(object_key, routers))
