"""Performs a plan: server-side applies in order, then deletions.

A child that the API server refuses does not hold up the others; it is returned, to be shown in the status and tried
again. When the API server does not answer at all, the pass ends.
"""

from dataclasses import dataclass

from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.errors import (
    KubeApiError,
    KubeForbiddenError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
)
from kvasir_operator.kinds import (
    CONFIG_MAP,
    POD_DISRUPTION_BUDGET,
    ROLE,
    ROLE_BINDING,
    SECRET,
    SERVICE_ACCOUNT,
    KubeObject,
    ObjectKey,
)
from kvasir_operator.kube import SCALING_FIELD_MANAGER, KubeClient
from kvasir_operator.plan import Apply, Plan
from kvasir_operator.resources.router_secret import with_random_value

# Kinds that may be deleted and made anew without touching a pod or a connection.
_REPLACEABLE = (CONFIG_MAP, POD_DISRUPTION_BUDGET, ROLE, ROLE_BINDING, SERVICE_ACCOUNT)
_REFUSALS = (KubeForbiddenError, ObjectConflictError, ObjectNotFoundError, ObjectRefusedError)


@dataclass(frozen=True)
class Refusal:
    """A child that could not be written, and why."""

    key: ObjectKey
    error: KubeApiError


@dataclass(frozen=True)
class Applied:
    """`written` are the applied children as they are now stored."""

    written: tuple[KubeObject, ...] = ()
    refusals: tuple[Refusal, ...] = ()


async def apply_plan(client: KubeClient, namespace: str, plan: Plan) -> Applied:
    """Raises KubeUnavailableError when the API server does not answer; what was written until then stays."""
    written: list[KubeObject] = []
    refusals: list[Refusal] = []
    for action in plan.applies:
        try:
            written.append(await _apply(client, action))
        except _REFUSALS as error:
            refusals.append(Refusal(action.key, error))
    for deletion in plan.deletes:
        try:
            await client.delete(deletion.key.kind, namespace, deletion.key.name, deletion.uid)
        except _REFUSALS as error:
            refusals.append(Refusal(deletion.key, error))
    return Applied(tuple(written), tuple(refusals))


async def _apply(client: KubeClient, action: Apply) -> KubeObject:
    if action.key.kind == SECRET:
        return await client.create(with_random_value(action.obj))
    if action.kept_replicas is not None:
        await client.apply(_replicas_only(action.obj, action.kept_replicas), SCALING_FIELD_MANAGER)
    try:
        return await client.apply(action.obj, FIELD_MANAGER)
    except ObjectRefusedError:
        if action.live_uid is None or action.key.kind not in _REPLACEABLE:
            raise
        # An immutable field changed, or somebody added a field that excludes one of ours: only a new object helps.
        await client.delete(action.key.kind, action.obj["metadata"]["namespace"], action.key.name, action.live_uid)
        return await client.apply(action.obj, FIELD_MANAGER)


def _replicas_only(obj: KubeObject, replicas: int) -> KubeObject:
    metadata = {"name": obj["metadata"]["name"], "namespace": obj["metadata"]["namespace"]}
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": metadata,
        "spec": {"replicas": replicas},
    }
