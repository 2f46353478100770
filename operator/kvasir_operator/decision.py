"""What a pass decides, purely, from what is desired and what was observed: the rollout's next step, and the plan."""

from collections.abc import Collection
from dataclasses import dataclass

from kvasir_operator.api.labels import REVISION_LABEL
from kvasir_operator.apply.plan import Cause, Plan, make_plan, stamped
from kvasir_operator.desired.objects import CurrentRevision, DesiredService
from kvasir_operator.kube.kinds import KubeObject, ObjectKey
from kvasir_operator.observe.gateway_state import GatewayState
from kvasir_operator.observe.observe import Observed
from kvasir_operator.rollout.children import kept_children, kept_router, scales, unweighs
from kvasir_operator.rollout.observed import ObservedWorkload, observe_workloads
from kvasir_operator.rollout.plan import RolloutPlan, plan_rollout
from kvasir_operator.rollout.scale_down import Shrink, find_shrinks
from kvasir_operator.rollout.workload import WorkloadKey


@dataclass(frozen=True)
class Decision:
    """What a pass has decided. `is_rolling`: there are workloads of former revisions."""

    plan: Plan
    shrinks: list[Shrink]
    rollout: RolloutPlan
    is_rolling: bool

    @property
    def news(self) -> Plan:
        """What is worth an event of its own; that a rollout makes its revision's workloads is not."""
        actions = self.plan.applies if self.is_rolling else ()
        made = [action for action in actions if action.cause is Cause.CREATED]
        return self.plan.without([each.key for each in made if REVISION_LABEL in each.obj["metadata"]["labels"]])


def decide(
    wanted: DesiredService, observed: Observed, obj: KubeObject, gateway: GatewayState | None, now: str
) -> Decision:
    workloads = observe_workloads(observed, obj["metadata"]["uid"], now)
    rollout = plan_rollout(
        wanted.revision,
        wanted.replicas,
        wanted.service.spec.rollout,
        [each.workload for each in workloads],
        wanted.blocked,
    )
    replicas = {role: rollout.replicas[WorkloadKey(role, rollout.revision)] for role in wanted.replicas}
    current = CurrentRevision(rollout.revision, rollout.number, replicas, rollout.traffic_weight)
    plan = make_plan(
        [stamped(child) for child in wanted.objects(current)],
        observed.children,
        obj,
        scales(rollout, workloads),
        unweighs(rollout, workloads, observed.children),
        _kept(wanted, rollout, workloads, observed, gateway),
    )
    is_rolling = any(each.workload.key.revision != wanted.revision for each in workloads)
    return Decision(plan, find_shrinks(rollout, workloads), rollout, is_rolling)


def _kept(
    wanted: DesiredService,
    rollout: RolloutPlan,
    workloads: Collection[ObservedWorkload],
    observed: Observed,
    gateway: GatewayState | None,
) -> frozenset[ObjectKey]:
    """Children that nobody renders any more and that still serve."""
    kept = kept_children(rollout, workloads, observed.children)
    if not wanted.service.is_behind_gateway or wanted.service.spec.suspend:
        return kept
    return kept | kept_router(rollout, observed.children, is_replaced=gateway is not None and gateway.serves)
