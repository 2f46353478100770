"""Kubernetes Events about a service: reported when something changes, never once a pass.

`notable_changes` is pure: it compares the stored status with the new one and looks at the plan. `post_event` posts; the
same fact once more raises the count of the Event that is there, so a flapping service cannot flood the namespace.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from kvasir_operator.api.conditions import ConditionType, Reason, find_condition
from kvasir_operator.api.labels import FIELD_MANAGER
from kvasir_operator.apply.plan import Cause, Plan
from kvasir_operator.errors import ObjectConflictError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import EVENT, INFERENCE_SERVICE, KubeObject

# Going idle and waking are what an autoscaled service does, and no news of a failure.
_READY_EVENTS = {Reason.SERVING: "Ready", Reason.IDLE: "Idle"}
EventType = Literal["Normal", "Warning"]
_MAX_MESSAGE_LENGTH = 1024  # characters; the API server refuses more


@dataclass(frozen=True)
class ServiceEvent:
    """One fact about a service, as `kubectl describe` shows it."""

    type: EventType
    reason: str
    message: str


def notable_changes(previous: dict[str, Any], status: dict[str, Any], plan: Plan) -> list[ServiceEvent]:
    """What a person would want to hear of this pass; empty for a pass that changed nothing."""
    return [
        *_child_changes(plan),
        *_revision_changes(previous, status),
        # Where it waits for a person; why it is halted is Degraded's to say.
        *_new_reason(previous, status, ConditionType.PROGRESSING, Reason.ROLLOUT_PAUSED, "Normal"),
        *_ready_changes(previous, status),
        *_new_reason(previous, status, ConditionType.MODEL_LOADED, Reason.CONTEXT_CUT, "Warning"),
        *_degraded_changes(previous, status),
        *_scaling_changes(previous, status),
    ]


def _child_changes(plan: Plan) -> Iterable[ServiceEvent]:
    created = [str(action.key) for action in plan.applies if action.cause is Cause.CREATED]
    if created:
        yield ServiceEvent("Normal", "Created", f"created {', '.join(created)}")
    for action in plan.applies:
        if action.cause is Cause.DRIFTED:
            message = f"put back what others changed in {action.key}: {', '.join(action.drift)}"
            yield ServiceEvent("Normal", "Restored", message)
    for restart in plan.restarts:
        kind: EventType = "Warning" if restart.annotations else "Normal"
        yield ServiceEvent(kind, "GroupRestarted", f"{restart.key}: its pods are made anew: {restart.cause}")
    if plan.deletes:
        yield ServiceEvent("Normal", "Deleted", f"deleted {', '.join(str(action.key) for action in plan.deletes)}")


def _revision_changes(previous: dict[str, Any], status: dict[str, Any]) -> Iterable[ServiceEvent]:
    before = {entry["role"]: entry.get("revision") for entry in previous.get("roles", [])}
    for entry in status["roles"]:
        old, new = before.get(entry["role"]), entry.get("revision")
        if old is not None and new is not None and old != new:
            yield ServiceEvent("Normal", "RevisionRolled", f"role {entry['role']} goes from revision {old} to {new}")


def _new_reason(
    previous: dict[str, Any], status: dict[str, Any], wanted: ConditionType, reason: Reason, kind: EventType
) -> Iterable[ServiceEvent]:
    before, after = _pair(previous, status, wanted)
    if after.get("reason") == reason and before.get("reason") != reason:
        yield ServiceEvent(kind, after["reason"], after["message"])


def _ready_changes(previous: dict[str, Any], status: dict[str, Any]) -> Iterable[ServiceEvent]:
    before, after = _pair(previous, status, ConditionType.READY)
    if after["status"] == "True" and (before.get("status"), before.get("reason")) != ("True", after["reason"]):
        yield ServiceEvent("Normal", _READY_EVENTS[after["reason"]], after["message"])
    elif after["status"] == "False" and before.get("status") == "True":
        kind: EventType = "Normal" if after["reason"] == Reason.SUSPENDED else "Warning"
        yield ServiceEvent(kind, "NotReady", f"{after['reason']}: {after['message']}")


def _degraded_changes(previous: dict[str, Any], status: dict[str, Any]) -> Iterable[ServiceEvent]:
    before, after = _pair(previous, status, ConditionType.DEGRADED)
    if after["status"] == "True" and (before.get("status"), before.get("reason")) != ("True", after["reason"]):
        yield ServiceEvent("Warning", after["reason"], after["message"])
    elif after["status"] == "False" and before.get("status") == "True":
        yield ServiceEvent("Normal", "Recovered", f"no longer {before['reason']}")


def _scaling_changes(previous: dict[str, Any], status: dict[str, Any]) -> Iterable[ServiceEvent]:
    for entry in status.get("scaling", []):
        if entry not in previous.get("scaling", []):
            change = f"{entry['role']}: from {entry['from']} to {entry['to']}"
            yield ServiceEvent("Normal", entry["reason"], f"{change}: {entry['message']}")
    before, after = _pair(previous, status, ConditionType.SCALING_ACTIVE)
    if after.get("status") == "False" and before.get("reason") != after["reason"]:
        yield ServiceEvent("Warning", after["reason"], after["message"])


def _pair(
    previous: dict[str, Any], status: dict[str, Any], wanted: ConditionType
) -> tuple[dict[str, Any], dict[str, Any]]:
    before = find_condition(previous.get("conditions", []), wanted)
    after = find_condition(status["conditions"], wanted)
    return before or {}, after or {}


async def post_event(client: KubeClient, service: KubeObject, event: ServiceEvent, now: str) -> None:
    """Creates the Event, or counts it once more; `now` is RFC 3339. Raises KubeApiError."""
    obj = _event_object(service, event, now)
    try:
        await client.create(obj)
    except ObjectConflictError:
        name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
        stored = await client.get(EVENT, namespace, name) or {}
        await client.merge(EVENT, namespace, name, {"count": stored.get("count", 1) + 1, "lastTimestamp": now})


def _event_object(service: KubeObject, event: ServiceEvent, now: str) -> KubeObject:
    metadata = service["metadata"]
    fact = "\n".join((metadata["uid"], event.type, event.reason, event.message))
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{metadata['name']}.{hashlib.sha256(fact.encode()).hexdigest()[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.kind,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MAX_MESSAGE_LENGTH],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
