"""Performs a plan: server-side applies in order, edits of what is not rendered any more, restarts, then deletions.

A child that the API server refuses does not hold up the others; it is returned, to be shown in the status and tried
again. So is one of which it says to try again later: a kind's storage may be busy, or a proxy dislike one request. Said
of a second it concerns all, and the pass ends, as when the API server does not answer at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_operator.api.conditions import Reason
from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.apply.plan import Apply, Edit, Plan, Restart
from kvasir_operator.errors import (
    OBJECT_ERRORS,
    AdmissionFailedError,
    KubeApiError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
)
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import (
    NETWORK_POLICY,
    POD,
    POD_DISRUPTION_BUDGET,
    POD_MONITOR,
    ROLE_BINDING,
    SECRET,
    SERVICE_ACCOUNT,
    KubeObject,
    ObjectKey,
)
from kvasir_operator.resources.router_secret import with_random_value

# Of a volume of an image: all other kinds have been there for long. Without the gate it drops the field, then looks.
_NOT_KNOWN = ("must specify a volume type", ".image: field not declared in schema")
_NO_IMAGE_VOLUMES = "oci:// needs image volumes: Kubernetes 1.35, or 1.31 with the feature gate ImageVolume"
# Kinds that may be deleted and made anew without touching a pod or a connection.
_REPLACEABLE = (NETWORK_POLICY, POD_DISRUPTION_BUDGET, POD_MONITOR, ROLE_BINDING, SERVICE_ACCOUNT)


@dataclass(frozen=True)
class Refusal:
    """A child that could not be written, and why."""

    key: ObjectKey
    error: KubeApiError

    @property
    def reason(self) -> Reason:
        if isinstance(self.error, AdmissionFailedError):
            return Reason.ADMISSION_FAILED
        return Reason.QUOTA_EXCEEDED if "exceeded quota" in str(self.error) else Reason.APPLY_FAILED

    @property
    def message(self) -> str:
        hint = f" ({_NO_IMAGE_VOLUMES})" if any(words in str(self.error) for words in _NOT_KNOWN) else ""
        return f"{self.key}: {self.error}{hint}"


@dataclass(frozen=True)
class Applied:
    """`written` are the applied children as they are now stored; `stale` were left, as they had changed."""

    written: tuple[KubeObject, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    stale: tuple[ObjectKey, ...] = ()

    def __add__(self, other: "Applied") -> "Applied":
        return Applied(self.written + other.written, self.refusals + other.refusals, self.stale + other.stale)


async def apply_plan(client: KubeClient, namespace: str, plan: Plan) -> Applied:
    """Raises KubeApiError when the API server does not answer or is busy; what was written until then stays."""
    written: list[KubeObject] = []
    stale: list[ObjectKey] = []
    refusals: list[Refusal] = []
    for action in plan.applies:
        try:
            written.append(await _apply(client, action))
        except KubeApiError as error:
            refusals.append(_refusal(action.key, error, refusals))
    changes: tuple[Edit | Restart, ...] = (*plan.edits, *plan.restarts)
    for change in changes:
        try:
            if isinstance(change, Restart):
                await _restart(client, namespace, change)
            else:
                written.append(await client.merge(change.key.kind, namespace, change.key.name, change.patch))
        except (ObjectConflictError, ObjectNotFoundError):
            stale.append(change.key)  # it changed since it was seen: what was decided may no longer hold
        except KubeApiError as error:
            refusals.append(_refusal(change.key, error, refusals))
    for deletion in plan.deletes:
        try:
            await client.delete(deletion.key.kind, namespace, deletion.key.name, deletion.uid)
        except KubeApiError as error:
            refusals.append(_refusal(deletion.key, error, refusals))
    return Applied(tuple(written), tuple(refusals), tuple(stale))


def _refusal(key: ObjectKey, error: KubeApiError, before: Sequence[Refusal]) -> Refusal:
    """Raises `error` where it is about more than this object."""
    is_answer = error.status is not None and all(isinstance(each.error, OBJECT_ERRORS) for each in before)
    if not isinstance(error, OBJECT_ERRORS) and not is_answer:
        raise error
    return Refusal(key, error)


async def _apply(client: KubeClient, action: Apply) -> KubeObject:
    if action.key.kind == SECRET:
        return await client.create(action.obj if "stringData" in action.obj else with_random_value(action.obj))
    try:
        return await client.apply(action.obj, FIELD_MANAGER)
    except ObjectRefusedError:
        if action.live_uid is None or action.key.kind not in _REPLACEABLE or not await _holds_as_new(client, action):
            raise
        # An immutable field changed, or somebody added a field that excludes one of ours: only a new object helps.
        await client.delete(action.key.kind, action.obj["metadata"]["namespace"], action.key.name, action.live_uid)
        return await client.apply(action.obj, FIELD_MANAGER)


async def _holds_as_new(client: KubeClient, action: Apply) -> bool:
    """Else its deletion would leave nothing in its place. Asked under a name that nobody has."""
    named = {**action.obj, "metadata": {**action.obj["metadata"], "name": f"{action.key.name}-anew"}}
    try:
        await client.dry_run(named)
    except OBJECT_ERRORS:
        return False
    return True


async def _restart(client: KubeClient, namespace: str, restart: Restart) -> None:
    """Recorded first: what an end of this process leaves undone, the next pass completes.

    Raises ObjectConflictError or ObjectNotFoundError where the group is not the one that was seen.
    """
    if restart.annotations:
        metadata = {"uid": restart.uid, "annotations": dict(restart.annotations)}
        await client.merge(restart.key.kind, namespace, restart.key.name, {"metadata": metadata})
    for pod in restart.pods:
        await client.delete(POD, namespace, pod.name, pod.uid, pod.grace_seconds, is_foreground=pod.is_foreground)
