"""The status of a service, derived purely from what was observed; nothing here remembers or guesses."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvasir_operator.api.conditions import Condition, ConditionType, Reason, carry_over
from kvasir_operator.api.labels import RANK_LABEL, ROLE_LABEL, ROLES, SERVICE_LABEL
from kvasir_operator.api.service_status import Phase
from kvasir_operator.autoscaling.ledger import merged_entries
from kvasir_operator.kube.kinds import KubeObject
from kvasir_operator.status.conditions import Situation, engines_of, service_conditions
from kvasir_operator.status.roles import RoleState

_STARTING_PODS = frozenset(
    {Reason.DOWNLOADING_MODEL, Reason.LOADING_MODEL, Reason.INITIALIZING, Reason.STARTING_ROUTER}
)


def derive_status(
    service: KubeObject, roles: Iterable[RoleState], situation: Situation, url: str | None, now: str
) -> dict[str, Any]:
    """The status to show, in the shape of api/service_status.py; what is not known is left out.

    `now` (RFC 3339) becomes the transition time of conditions whose status changes.
    """
    metadata, previous = service["metadata"], service.get("status", {})
    ordered = sorted(roles, key=lambda state: ROLES.index(state.role))
    conditions, engines = service_conditions(ordered, situation), engines_of(ordered)
    status = {
        "observedGeneration": metadata["generation"],
        "phase": _phase(conditions, engines),
        "url": url,
        "ready": f"{sum(each.ready for each in engines)}/{sum(each.desired for each in engines)}" if engines else None,
        "replicas": sum(state.num_replicas for state in engines),
        "selector": _selector(metadata["name"], engines) if engines else None,
        "roles": [_role_entry(state) for state in ordered],
        "conditions": carry_over(previous.get("conditions", []), conditions, metadata["generation"], now),
        "scaling": _scaling_entries(previous, situation),
    }
    return {key: value for key, value in status.items() if value is not None}


def unread_status(service: KubeObject, message: str, now: str) -> dict[str, Any]:
    """As it was, and that it may be so no more; `now` as above."""
    metadata, previous = service["metadata"], service.get("status", {})
    before: list[dict[str, Any]] = previous.get("conditions", [])
    kinds = [ConditionType.DEGRADED] if before else [ConditionType.READY, ConditionType.DEGRADED]
    news = [Condition(kind, kind is ConditionType.DEGRADED, Reason.APPLY_FAILED, message) for kind in kinds]
    new = carry_over(before, news, metadata["generation"], now)
    ours = {kind.value for kind in ConditionType} - {kind.value for kind in kinds}
    kept = [each for each in before if each["type"] in ours]
    return {"replicas": 0, "roles": [], **previous, "phase": "Degraded", "conditions": [*kept, *new]}


def _scaling_entries(previous: dict[str, Any], situation: Situation) -> list[dict[str, Any]] | None:
    """What was decided stays to be read after autoscaling was switched off."""
    new = () if situation.scaling is None else situation.scaling.entries
    return merged_entries(previous.get("scaling", []), new) or None


def _selector(name: str, engines: Sequence[RoleState]) -> str:
    """Of the pods that `replicas` counts: of groups their first ones, where the service has no other role."""
    roles = [state.role for state in engines]
    role = f"{ROLE_LABEL}={roles[0]}" if len(roles) == 1 else f"{ROLE_LABEL} in ({','.join(roles)})"
    leaders = f",{RANK_LABEL}=0" if len(engines) == 1 and engines[0].has_groups else ""
    return f"{SERVICE_LABEL}={name},{role}{leaders}"


def _role_entry(state: RoleState) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "role": state.role,
        "desired": state.desired,
        "ready": state.ready,
        "draining": state.draining,
        "message": state.waiting.message if state.waiting else "",
    }
    return entry if state.revision is None else {**entry, "revision": state.revision}


def _phase(conditions: Sequence[Condition], engines: Sequence[RoleState]) -> Phase:
    by_type = {condition.type: condition for condition in conditions}
    progressing, ready = by_type[ConditionType.PROGRESSING], by_type[ConditionType.READY]
    if ready.reason is Reason.SUSPENDED:
        return "Suspended"
    if by_type[ConditionType.DEGRADED].is_true:
        return "Degraded"
    if ready.reason is Reason.IDLE:
        return "Idle"
    if progressing.reason in (Reason.ROLLOUT_IN_PROGRESS, Reason.ROLLOUT_PAUSED):
        return "Updating"
    if ready.is_true and not progressing.is_true:
        return "Ready"
    if any(state.ready for state in engines):
        return "Scaling"
    return "Loading" if ready.reason in _STARTING_PODS else "Pending"
