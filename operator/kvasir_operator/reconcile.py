"""One pass over one service: desired, observe, plan, apply (the least busy replicas go first), report.

Level-triggered: a pass reads everything it needs and knows nothing of what woke it, so creation, update, resumption
after a crash, a child's event and the periodic resync are the same pass. Over an unchanged service it writes nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply.apply import Applied, apply_plan
from kvasir_operator.apply.foreign_writes import ForeignWrites
from kvasir_operator.apply.plan import Apply, Cause, Plan, controller_uid, stamped
from kvasir_operator.autoscaling.ledger import ScalingLedger, replicas_by_role
from kvasir_operator.decision import Decision, decide, next_step
from kvasir_operator.desired.objects import DesiredService, desired_service
from kvasir_operator.errors import OBJECT_ERRORS, ChildrenRefusedError, InvalidManifestError, KubeApiError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import (
    INFERENCE_SERVICE,
    LEADER_WORKER_SET,
    POD_MONITOR,
    STATEFUL_SET,
    WORKLOAD_KINDS,
    Kind,
    KubeObject,
    ObjectKey,
    ServiceKey,
    is_terminating,
    listed_child_kinds,
    object_key,
    service_key,
)
from kvasir_operator.observe.engine_http import (
    ReadContexts,
    ReadDownloads,
    SeenContexts,
    read_contexts,
    read_downloads,
    read_work,
)
from kvasir_operator.observe.gateway import GatewayObserver
from kvasir_operator.observe.informer import COUNTS_WAIT_SECONDS
from kvasir_operator.observe.model_loader import look_at_downloads_seconds
from kvasir_operator.observe.observe import Observed, named, observe
from kvasir_operator.observe.pod_events import look_again_seconds
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.resources.services import service_url
from kvasir_operator.rollout.children import needed_without_a_spec
from kvasir_operator.rollout.observed import num_replicas, observe_workloads, revision_number
from kvasir_operator.rollout.scale_down import ReadWork, mark_least_work, read_shrinking
from kvasir_operator.rollout.upgrades import Upgrades
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.status.conditions import Situation
from kvasir_operator.status.events import notable_changes, post_event
from kvasir_operator.status.problems import find_problems
from kvasir_operator.status.report import differs_in_detail, report_status
from kvasir_operator.status.restarts import RestartCounter
from kvasir_operator.status.roles import RoleState, idle_role, role_of, role_state
from kvasir_operator.status.status import derive_status, unread_status

logger = logging.getLogger(__name__)

TERMINATING_RETRY_SECONDS = 2.0
ENDING_NAMESPACE_SECONDS = 10.0
"""After a child was refused because its namespace goes: each that goes with it would have the rest applied again."""
NAME_TAKEN_RETRY_SECONDS = 30.0
STALE_RETRY_SECONDS = 1.0
"""After a workload had changed before it was scaled, or the service before its status was stored."""
LEFT_RETRY_SECONDS = COUNTS_WAIT_SECONDS
"""Until what a burst has left is done, in the pass that its pods' counts want anyway."""
TURN_SECONDS = 60.0
"""Between two looks whether it is a service's turn to replace its engines."""
DETAILS_RETRY_SECONDS = COUNTS_WAIT_SECONDS
"""Until counts and messages are reported that what this pass did is about to change."""


@dataclass(frozen=True)
class Outcome:
    """`is_gone`: there is nothing left to reconcile. `retry_seconds`: look again then; None leaves it to events.

    `is_debounced`: or later, once what this pass did has been counted.
    """

    is_gone: bool = False
    retry_seconds: float | None = None
    is_debounced: bool = False


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Brings services to what their specs say. Remembers of each its restarts, what others do to its children, and what
    a pass has left to the next."""

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        kinds: Callable[[], Collection[Kind]],
        gateway: GatewayObserver,
        now: Callable[[], str] = utc_now,
        read_work: ReadWork = read_work,
        read_downloads: ReadDownloads = read_downloads,
        read_contexts: ReadContexts = read_contexts,
        do_changes_wait: Callable[[ServiceKey], bool] = lambda key: False,
        ledger: ScalingLedger | None = None,
        restarts: RestartCounter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kinds`: optional ones that the cluster serves. `do_changes_wait` says whether specs of other services than
        this wait to be applied; `ledger` holds what was decided of replicas, None where nothing ever is; `restarts`
        shows how often replicas were restarted; `clock` gives monotonic seconds."""
        self._client = client
        self._settings = settings
        self._kinds = kinds
        self._gateway = gateway
        self._now = now
        self._clock = clock
        self._read_work = read_work
        self._read_downloads = read_downloads
        self._contexts = SeenContexts(read_contexts, clock)
        self._do_changes_wait = do_changes_wait
        self._ledger = ledger or ScalingLedger()
        self._restarts = restarts or RestartCounter()
        self._upgrades = Upgrades(settings.max_upgrades)
        self._left: set[ServiceKey] = set()
        self._foreign_writes: dict[ServiceKey, ForeignWrites] = {}
        self._ending_namespaces: dict[str, float] = {}
        """Until when each is left alone."""

    async def reconcile(self, key: ServiceKey) -> Outcome:
        """Raises KubeApiError when the API server does not answer, ChildrenRefusedError when it refused a child."""
        obj = await self._client.get(INFERENCE_SERVICE, key.namespace, key.name)
        if obj is None or is_terminating(obj):
            self._left.discard(key)
            self._foreign_writes.pop(key, None)
            self._gateway.forget(key)
            self._restarts.forget(key)
            self._contexts.forget(key)
            self._upgrades.forget(key)
            return Outcome(is_gone=True)  # the garbage collector takes the children
        if (left_seconds := self._ending_namespaces.get(key.namespace, 0.0) - self._clock()) > 0:
            return Outcome(retry_seconds=left_seconds)
        try:
            wanted = self._desired(obj)
        except InvalidManifestError as error:
            return await self._report_invalid(key, obj, error)
        try:
            observed = await self._observe(obj, wanted.keys)
            gateway = await self._gateway.state_of(obj)
        except OBJECT_ERRORS as error:
            await self._report_unread(key, obj, error)
            raise
        now = self._now()
        workloads = observe_workloads(observed, obj["metadata"]["uid"], now)
        is_waiting = self._upgrades.has_to_wait(key, obj, wanted.revision, [each.workload for each in workloads])
        step = next_step(wanted, observed, workloads, is_waiting=is_waiting)
        if step.missing:
            observed = observed.with_children(await named(self._client, key.namespace, map(object_key, step.missing)))
        work = await read_shrinking(step.shrinks, self._read_work)
        foreign = self._foreign_writes.setdefault(key, ForeignWrites(self._client, self._clock))
        decision = decide(wanted, observed, obj, step, gateway, now, work)
        settled = await foreign.settle(decision.plan, observed.children)
        decision = replace(decision, plan=settled.plan)
        await mark_least_work(self._client, step.shrinks, work)
        applied = Applied()
        for turn in decision.plan.in_turns():
            done = await apply_plan(self._client, key.namespace, turn)
            foreign.remember(turn, done.written)
            applied += done
            if _can_be_left_here(turn, decision, applied) and self._do_changes_wait(key):
                self._left.add(key)
                return Outcome(retry_seconds=LEFT_RETRY_SECONDS)
        if any("being terminated" in str(refusal.error) for refusal in applied.refusals):
            self._ending_namespaces[key.namespace] = self._clock() + ENDING_NAMESPACE_SECONDS
        seen = _after(observed, decision.plan, applied)
        roles = _roles(seen, obj, wanted.replicas, wanted.revision, _not_ours(decision.plan))
        problems = find_problems(
            wanted.unsupported, applied.refusals, decision.plan.blocked, settled.contested, gateway, decision.problems
        )
        situation = Situation(
            wanted.service.model_names[0],
            problems,
            decision.rollout,
            wanted.blocked,
            wanted.service.spec.suspend,
            gateway,
            cut_context=observed.cut_context,
            scaling=self._ledger.scaling_of(key) if wanted.is_autoscaled else None,
        )
        status = derive_status(obj, roles, situation, _url(wanted, obj), self._now())
        news = decision.news.without([refusal.key for refusal in applied.refusals])
        is_overtaken = _moves_replicas(decision.plan) and _is_seen_later(decision, applied) and not news.deletes
        is_left = is_overtaken and (key in self._left or differs_in_detail(obj.get("status", {}), status))
        self._left.discard(key)
        is_reported = is_left or await self._report(key, obj, status, news)
        turn_seconds = TURN_SECONDS if is_waiting else None
        looks = (_look_seconds(observed, self._now()), settled.retry_seconds, decision.retry_seconds, turn_seconds)
        outcome = _outcome(decision.plan, applied, is_reported, _soonest(looks))
        return _with_details(outcome) if is_left else outcome

    def _desired(self, obj: KubeObject) -> DesiredService:
        kinds = self._kinds()
        scaled = replicas_by_role(self._ledger.scaling_of(service_key(obj)), obj)
        group_kind = LEADER_WORKER_SET if LEADER_WORKER_SET in kinds else STATEFUL_SET
        service, settings = parse_service(obj), self._settings
        return desired_service(service, settings, POD_MONITOR in kinds, scaled, group_kind)

    async def _observe(self, obj: KubeObject, wanted: Collection[ObjectKey]) -> Observed:
        key = service_key(obj)
        observed = await observe(self._client, key, wanted, listed_child_kinds(self._kinds()))
        self._restarts.observe(key, observed)
        downloads, cut_context = await asyncio.gather(
            self._read_downloads(observed.pods), self._contexts.shortest_cut(key, observed.pods)
        )
        return replace(observed, downloads=downloads, cut_context=cut_context)

    async def _report_invalid(self, key: ServiceKey, obj: KubeObject, error: InvalidManifestError) -> Outcome:
        """Children stay as they are, and what their pods need is made again: what runs keeps serving until the spec
        holds."""
        observed = await self._observe(obj, [])
        workloads = observe_workloads(observed, obj["metadata"]["uid"], self._now())
        seen = set(map(object_key, observed.children))
        missing = {name: each for name, each in needed_without_a_spec(obj, workloads).items() if name not in seen}
        taken = map(object_key, await named(self._client, key.namespace, missing))
        plan = Plan(tuple(Apply(stamped(each), Cause.CREATED) for each in missing.values())).without(list(taken))
        done = await apply_plan(self._client, key.namespace, plan)
        roles = _roles(observed, obj, {}, "", ())
        gateway = await self._gateway.state_of(obj)
        situation = Situation(key.name, [Waiting(Reason.INVALID_SPEC, str(error))], gateway=gateway)
        status = derive_status(obj, roles, situation, obj.get("status", {}).get("url"), self._now())
        is_reported = await self._report(key, obj, status, plan.without([each.key for each in done.refusals]))
        return _outcome(plan, done, is_reported, _look_seconds(observed, self._now()))

    async def _report_unread(self, key: ServiceKey, obj: KubeObject, error: KubeApiError) -> None:
        """The API server does not show what must be known: nothing is done, and what was seen before stands."""
        await self._report(key, obj, unread_status(obj, f"what there is cannot be read: {error}", self._now()), Plan())

    async def _report(self, key: ServiceKey, obj: KubeObject, status: dict[str, Any], done: Plan) -> bool:
        """Reports what is news: `done` is what of the plan the API server accepted. False: no status was stored."""
        previous = obj.get("status", {})
        for event in notable_changes(previous, status, done):
            logger.info("%s: %s: %s", key, event.reason, event.message)
            try:
                await post_event(self._client, obj, event, self._now())
            except OBJECT_ERRORS as error:
                logger.warning("%s: event %s not posted: %s", key, event.reason, error)
        return await report_status(self._client, obj, status)


def _can_be_left_here(turn: Plan, decision: Decision, applied: Applied) -> bool:
    """Whether this turn brought the service on, and the next pass will see all that is left to do and to report."""
    return _moves_replicas(turn) and not turn.deletes and _is_seen_later(decision, applied)


def _moves_replicas(plan: Plan) -> bool:
    moved = (*(action.key for action in plan.applies), *(edit.key for edit in plan.edits))
    return any(key.kind in WORKLOAD_KINDS for key in moved)


def _is_seen_later(decision: Decision, applied: Applied) -> bool:
    """Whether nothing was created, restored, restarted or refused, which is known to this pass only."""
    plan = decision.plan
    is_plain = not (applied.refusals or plan.restarts or plan.blocked or plan.terminating)
    return is_plain and all(action.cause is Cause.CHANGED for action in decision.news.applies)


def _outcome(plan: Plan, applied: Applied, is_reported: bool, again_seconds: float | None) -> Outcome:
    if applied.refusals:
        raise ChildrenRefusedError("; ".join(refusal.message for refusal in applied.refusals))
    if applied.stale or not is_reported:
        return Outcome(retry_seconds=STALE_RETRY_SECONDS)
    if plan.terminating:
        return Outcome(retry_seconds=TERMINATING_RETRY_SECONDS)
    return Outcome(retry_seconds=again_seconds or (NAME_TAKEN_RETRY_SECONDS if plan.blocked else None))


def _with_details(outcome: Outcome) -> Outcome:
    """The same, and what is left of the status is reported."""
    if outcome.retry_seconds is None:
        return Outcome(retry_seconds=DETAILS_RETRY_SECONDS, is_debounced=True)
    return Outcome(retry_seconds=min(outcome.retry_seconds, DETAILS_RETRY_SECONDS))


def _after(observed: Observed, plan: Plan, applied: Applied) -> Observed:
    """What there is after the plan; what the API server refused to make, as it was desired."""
    made = [action.obj for action in plan.applies if action.cause is Cause.CREATED]
    return observed.with_children(made).with_children(applied.written)


def _roles(
    observed: Observed, obj: KubeObject, desired: Mapping[str, int], revision: str, not_ours: Collection[ObjectKey]
) -> list[RoleState]:
    """Of every role that has a Deployment or groups, or is wanted to.

    `desired`: replicas wanted by role; what those objects ask for where absent.
    """
    by_role: dict[str, list[KubeObject]] = {}
    for child in observed.children:
        is_own = controller_uid(child) in (None, obj["metadata"]["uid"]) and object_key(child) not in not_ours
        if is_own and object_key(child).kind in WORKLOAD_KINDS and (role := role_of(child)) is not None:
            by_role.setdefault(role, []).append(child)
    idle = [idle_role(role, wanted, revision, observed.pods) for role, wanted in desired.items() if role not in by_role]
    return idle + [
        role_state(
            sorted(workloads, key=revision_number, reverse=True),
            desired.get(role, num_replicas(workloads)),
            observed.pods,
            observed.pod_events,
            observed.downloads,
        )
        for role, workloads in by_role.items()
    ]


def _soonest(seconds: Iterable[float | None]) -> float | None:
    return min((each for each in seconds if each is not None), default=None)


def _look_seconds(observed: Observed, now: str) -> float | None:
    """When what no watch shows is to be looked at again: why pods are not made, and how downloads go."""
    return _soonest((look_again_seconds(observed.pods, now), look_at_downloads_seconds(observed.pods)))


def _not_ours(plan: Plan) -> frozenset[ObjectKey]:
    """Children whose name somebody else has, and those that have just been deleted."""
    return frozenset((*plan.blocked, *(each.key for each in plan.deletes)))


def _url(wanted: DesiredService, obj: KubeObject) -> str | None:
    """While there is no gateway that a service could be behind, its last address is the one that may serve still."""
    return service_url(wanted.service, wanted.settings.defaults.gateway) or obj.get("status", {}).get("url")
