"""What a pass decides, purely, from what is desired and what was observed: the rollout's next step, and the plan.

In two steps, since which replicas go depends on how busy they are, and only of those that may go is that asked.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, group_index
from kvasir_operator.apply.plan import Cause, Plan, make_plan, stamped
from kvasir_operator.desired.objects import CurrentRevision, DesiredService
from kvasir_operator.groups.group import (
    Group,
    WantedGroup,
    chosen_indexes,
    kinds_by_index,
    staying,
    taken_apart,
)
from kvasir_operator.groups.restart import (
    RestartDecision,
    decide_restart,
    group_problems,
    record_after,
    removed_sets,
    restart_asked_for,
    restart_gracefully,
    take_apart,
)
from kvasir_operator.kube.kinds import KubeObject, ObjectKey, object_key
from kvasir_operator.observe.model_names import GatewayState
from kvasir_operator.observe.observe import Observed
from kvasir_operator.observe.replicas import group_of, replicas_of
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.rollout.children import (
    GoingGroups,
    kept_children,
    kept_router,
    needed_children,
    scales,
    weight_removals,
)
from kvasir_operator.rollout.observed import ObservedWorkload, lost_workloads
from kvasir_operator.rollout.plan import RolloutPlan, plan_rollout
from kvasir_operator.rollout.scale_down import Shrink, Work, find_shrinks, going
from kvasir_operator.rollout.workload import WorkloadKey

_NO_WORK: Work = MappingProxyType({})


@dataclass(frozen=True)
class RolloutStep:
    """Where the rollout goes next, and what was observed of it.

    needed: children that pods of former revisions need. missing: of these, what is neither there nor in the spec.
    """

    workloads: Sequence[ObservedWorkload]
    rollout: RolloutPlan
    shrinks: list[Shrink]
    needed: frozenset[ObjectKey] = frozenset()
    missing: tuple[KubeObject, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What a pass has decided. `is_rolling`: there are workloads of former revisions.

    problems: of groups, and of former revisions. retry_seconds: when a group may be restarted; None: nothing waits for
        that.
    """

    plan: Plan
    shrinks: list[Shrink]
    rollout: RolloutPlan
    is_rolling: bool
    problems: tuple[Waiting, ...] = ()
    retry_seconds: float | None = None

    @property
    def news(self) -> Plan:
        """What is worth an event of its own; that a rollout makes its revision's children and takes former ones away
        is not."""
        actions = self.plan.applies if self.is_rolling else ()
        made = [action for action in actions if action.cause is Cause.CREATED]
        own = [each.key for each in made if each.workload[1] == self.rollout.revision]
        former = [each.key for each in self.plan.deletes if each.revision not in (None, self.rollout.revision)]
        return self.plan.without([*own, *former])


def next_step(
    wanted: DesiredService, observed: Observed, workloads: Sequence[ObservedWorkload], *, is_waiting: bool = False
) -> RolloutStep:
    """`is_waiting`: it is not this service's turn to replace its engines."""
    rollout = plan_rollout(
        wanted.revision,
        wanted.replicas,
        wanted.service.spec.rollout,
        [each.workload for each in workloads],
        wanted.blocked,
        is_waiting=is_waiting,
    )
    needed = needed_children(rollout, workloads, wanted.service)
    seen = {*wanted.keys, *map(object_key, observed.children)} if needed else set()
    missing = tuple(child for key, child in needed.items() if key not in seen)
    return RolloutStep(workloads, rollout, find_shrinks(rollout, workloads), frozenset(needed), missing)


def decide(
    wanted: DesiredService,
    observed: Observed,
    obj: KubeObject,
    step: RolloutStep,
    gateway: GatewayState | None,
    now: str,
    work: Work = _NO_WORK,
) -> Decision:
    """`work`: how busy the replicas of shrinking workloads are."""
    rollout, workloads = step.rollout, step.workloads
    going_groups = {shrink.key: frozenset(replica.name for replica in going(shrink, work)) for shrink in step.shrinks}
    restarts = _restarts(rollout, workloads, going_groups, now)
    replicas = {role: rollout.replicas[WorkloadKey(role, rollout.revision)] for role in wanted.replicas}
    groups = _wanted_groups(wanted, replicas, observed, workloads, going_groups, restarts, now)
    current = CurrentRevision(rollout.revision, rollout.number, replicas, rollout.traffic_weight, groups)
    plan = make_plan(
        map(stamped, [*wanted.objects(current), *step.missing]),
        observed.children,
        obj,
        (*scales(rollout, workloads, going_groups), *weight_removals(rollout, workloads, observed.children)),
        tuple(each.restart for each in restarts.values() if each.restart is not None),
        step.needed | _kept(wanted, rollout, workloads, observed, gateway),
    )
    is_rolling = any(each.workload.key.revision != wanted.revision for each in workloads)
    return Decision(
        plan,
        step.shrinks,
        rollout,
        is_rolling,
        (
            *group_problems([group for each in workloads for group in each.groups], now),
            *removed_sets(observed.pods, wanted.group_kind),
            *lost_workloads(observed.pods, workloads, wanted.revision, obj["metadata"]["creationTimestamp"]),
        ),
        min((each.retry_seconds for each in restarts.values() if each.retry_seconds is not None), default=None),
    )


def _restarts(
    rollout: RolloutPlan, workloads: Collection[ObservedWorkload], going_groups: GoingGroups, now: str
) -> dict[str, RestartDecision]:
    """By name, of the groups that run on."""
    decisions: dict[str, RestartDecision] = {}
    for each in workloads:
        key = each.workload.key
        groups = staying(each.groups, rollout.replicas.get(key, 0), going_groups.get(key, frozenset()))
        decisions |= {group.name: decide_restart(group, now) for group in groups}
        asked = restart_asked_for(groups)
        if asked is not None and decisions[asked.name].restart is None:
            decisions[asked.name] = restart_gracefully(asked)
    current = (group for each in workloads if each.workload.key.revision == rollout.revision for group in each.groups)
    return decisions | {group.name: take_apart(group) for group in taken_apart(current)}


def _wanted_groups(
    wanted: DesiredService,
    replicas: Mapping[str, int],
    observed: Observed,
    workloads: Collection[ObservedWorkload],
    going_groups: GoingGroups,
    restarts: Mapping[str, RestartDecision],
    now: str,
) -> dict[str, Sequence[WantedGroup]]:
    """Of the current revision, by role."""
    by_key = {each.workload.key: each.groups for each in workloads if each.workload.key.revision == wanted.revision}
    current = [group for groups in by_key.values() for group in groups]
    apart = {group.name for group in taken_apart(current)}
    is_room_lacking = any(group.is_partly_placed for group in current)
    found: dict[str, Sequence[WantedGroup]] = {}
    for role in wanted.roles:
        if not role.is_grouped:
            continue
        key = WorkloadKey(role.name, wanted.revision)
        groups = by_key.get(key, [])
        avoided = _avoided_nodes(groups, restarts, now)
        num_wanted = replicas[role.name]
        if is_room_lacking:
            num_wanted = min(num_wanted, sum(group.is_running and group.name not in apart for group in groups))
        going_now = apart | going_groups.get(key, frozenset())
        indexes = chosen_indexes(groups, num_wanted, going_now, _taken(observed.pods, key))
        kinds = kinds_by_index(groups, indexes, wanted.group_kind)
        found[role.name] = [WantedGroup(index, avoided.get(index, ()), kinds[index]) for index in indexes]
    return found


def _avoided_nodes(
    groups: Iterable[Group], restarts: Mapping[str, RestartDecision], now: str
) -> dict[int, tuple[str, ...]]:
    """By index, as they are once this pass has recorded its restarts: pods are made anew after that."""
    found = {}
    for group in groups:
        record = record_after(group, restarts.get(group.name, RestartDecision()))
        # To forget them would change the template: of a LeaderWorkerSet they are avoided until its next restart.
        found[group.index] = (record if group.is_leader_worker_set else record.current(now)).avoided_nodes
    return found


def _taken(pods: Iterable[KubeObject], key: WorkloadKey) -> frozenset[int]:
    """Indexes of groups that are on their way out."""
    own_labels = {ROLE_LABEL: key.role, REVISION_LABEL: key.revision}.items()
    own = [pod for pod in pods if own_labels <= pod["metadata"].get("labels", {}).items() and group_of(pod)]
    return frozenset(group_index(replica.name) for replica in replicas_of(own) if replica.is_leaving)


def _kept(
    wanted: DesiredService,
    rollout: RolloutPlan,
    workloads: Collection[ObservedWorkload],
    observed: Observed,
    gateway: GatewayState | None,
) -> frozenset[ObjectKey]:
    """Children that nobody renders any more and that still serve."""
    kept = kept_children(rollout, workloads)
    if not wanted.service.is_behind_gateway or wanted.service.spec.suspend:
        return kept
    return kept | kept_router(rollout, observed.children, is_replaced=gateway is not None and gateway.serves)
