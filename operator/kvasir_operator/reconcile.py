"""One pass over one service: observe, desired, plan, apply (the least busy pods go first), status.

Level-triggered: a pass reads everything it needs and knows nothing of what woke it, so creation, update, resumption
after a crash, a child's event and the periodic resync are the same pass. Over an unchanged service it writes nothing.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import ROLE_LABEL, ROLE_ROUTER, ROUTER_HTTP_PORT
from kvasir_operator.api.model import InferenceService
from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply import Applied, Refusal, apply_plan
from kvasir_operator.desired import desired_objects, unsupported_features
from kvasir_operator.engine_work import read_work
from kvasir_operator.errors import (
    ChildrenRefusedError,
    InvalidManifestError,
    KubeForbiddenError,
    ObjectNotFoundError,
    ObjectRefusedError,
)
from kvasir_operator.events import notable_changes, post_event
from kvasir_operator.kinds import (
    DEPLOYMENT,
    INFERENCE_SERVICE,
    SERVICE,
    KubeObject,
    ServiceKey,
    is_terminating,
    object_key,
)
from kvasir_operator.kube import KubeClient
from kvasir_operator.observe import Observed, observe
from kvasir_operator.plan import Cause, Plan, controller_uid, make_plan, stamped
from kvasir_operator.pod_events import look_again_seconds
from kvasir_operator.scale_down import ReadWork, find_shrinks, mark_least_work
from kvasir_operator.settings import OperatorSettings
from kvasir_operator.status import RoleState, derive_status, role_state, status_patch
from kvasir_operator.waiting import Waiting

logger = logging.getLogger(__name__)

TERMINATING_RETRY_SECONDS = 2.0
NAME_TAKEN_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
    """`is_gone`: there is nothing left to reconcile. `retry_seconds`: look again then; None leaves it to events."""

    is_gone: bool = False
    retry_seconds: float | None = None


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Brings services to what their specs say. Holds no state between passes."""

    def __init__(
        self,
        client: KubeClient,
        settings: OperatorSettings,
        now: Callable[[], str] = utc_now,
        read_work: ReadWork = read_work,
        do_changes_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """`do_changes_wait` says whether other services' specs wait to be applied."""
        self._client = client
        self._settings = settings
        self._now = now
        self._read_work = read_work
        self._do_changes_wait = do_changes_wait

    async def reconcile(self, key: ServiceKey) -> Outcome:
        """Raises KubeApiError when the API server does not answer, ChildrenRefusedError when it refused a child."""
        obj = await self._client.get(INFERENCE_SERVICE, key.namespace, key.name)
        if obj is None or is_terminating(obj):
            return Outcome(is_gone=True)  # the garbage collector takes the children
        try:
            service = parse_service(obj)
        except InvalidManifestError as error:
            return await self._report_invalid(key, obj, error)
        desired = [stamped(child) for child in desired_objects(service, self._settings)]
        observed = await observe(self._client, key, [object_key(child) for child in desired])
        plan = make_plan(desired, observed.children, obj)
        await mark_least_work(self._client, find_shrinks(plan, observed), self._read_work)
        applied = await apply_plan(self._client, key.namespace, plan)
        if _can_be_told_later(plan, applied) and self._do_changes_wait():
            return Outcome(retry_seconds=0.0)
        status = derive_status(
            obj,
            _roles(desired, observed.with_children(applied.written), plan),
            _problems(service, plan, applied),
            service.model_names[0],
            _url(key, desired),
            self._now(),
        )
        await self._report(key, obj, status, plan.without([refusal.key for refusal in applied.refusals]))
        return _outcome(plan, applied, look_again_seconds(observed.pods, self._now()))

    async def _report_invalid(self, key: ServiceKey, obj: KubeObject, error: InvalidManifestError) -> Outcome:
        """Children stay as they are: what runs keeps serving until the spec holds again."""
        observed = await observe(self._client, key, [])
        own = [child for child in observed.children if controller_uid(child) == obj["metadata"]["uid"]]
        deployments = [child for child in own if object_key(child).kind == DEPLOYMENT]
        roles = [role_state(child, observed.pods, observed.pod_events) for child in deployments]
        problem = Waiting(Reason.INVALID_SPEC, str(error))
        status = derive_status(obj, roles, [problem], key.name, obj.get("status", {}).get("url"), self._now())
        await self._report(key, obj, status, Plan())
        return Outcome(retry_seconds=look_again_seconds(observed.pods, self._now()))

    async def _report(self, key: ServiceKey, obj: KubeObject, status: dict[str, Any], done: Plan) -> None:
        """Tells what is news: `done` is what of the plan the API server accepted."""
        previous = obj.get("status", {})
        for event in notable_changes(previous, status, done):
            logger.info("%s: %s: %s", key, event.reason, event.message)
            try:
                await post_event(self._client, obj, event, self._now())
            except (KubeForbiddenError, ObjectRefusedError) as error:
                logger.warning("%s: event %s not posted: %s", key, event.reason, error)
        patch = status_patch(previous, status)
        if not patch:
            return
        try:
            await self._client.merge_status(INFERENCE_SERVICE, key.namespace, key.name, patch)
        except ObjectNotFoundError:
            logger.info("%s: deleted during its pass", key)


def _can_be_told_later(plan: Plan, applied: Applied) -> bool:
    """Whether the next pass will see all that there is to tell: children were changed, and nothing else was to do.

    What was created, restored, deleted or refused is known to this pass only.
    """
    is_plain = not (applied.refusals or plan.deletes or plan.blocked or plan.terminating)
    return is_plain and bool(plan.applies) and all(action.cause is Cause.CHANGED for action in plan.applies)


def _outcome(plan: Plan, applied: Applied, again_seconds: float | None) -> Outcome:
    if applied.refusals:
        raise ChildrenRefusedError("; ".join(f"{refusal.key}: {refusal.error}" for refusal in applied.refusals))
    if plan.terminating:
        return Outcome(retry_seconds=TERMINATING_RETRY_SECONDS)
    return Outcome(retry_seconds=again_seconds or (NAME_TAKEN_RETRY_SECONDS if plan.blocked else None))


def _roles(desired: Iterable[KubeObject], observed: Observed, plan: Plan) -> list[RoleState]:
    """By the live Deployment; by the desired one where the API server refused to make it."""
    live = {object_key(child): child for child in observed.children}
    wanted = {object_key(child): child for child in desired}
    return [
        role_state(live.get(key, child), observed.pods, observed.pod_events)
        for key, child in wanted.items()
        if key.kind == DEPLOYMENT and key not in plan.blocked
    ]


def _problems(service: InferenceService, plan: Plan, applied: Applied) -> list[Waiting]:
    taken = "exists and belongs to somebody else: delete or rename it, or rename the service"
    return [
        *(Waiting(Reason.UNSUPPORTED_FEATURE, str(feature)) for feature in unsupported_features(service)),
        *map(_refused, applied.refusals),
        *(Waiting(Reason.NAME_TAKEN, f"{key} {taken}") for key in plan.blocked),
    ]


def _refused(refusal: Refusal) -> Waiting:
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in str(refusal.error) else Reason.APPLY_FAILED
    return Waiting(reason, f"{refusal.key}: {refusal.error}")


def _url(key: ServiceKey, desired: Iterable[KubeObject]) -> str | None:
    for child in desired:
        if object_key(child).kind == SERVICE and child["metadata"]["labels"].get(ROLE_LABEL) == ROLE_ROUTER:
            return f"http://{child['metadata']['name']}.{key.namespace}.svc:{ROUTER_HTTP_PORT}/v1"
    return None
