"""The status of a service, derived purely from what was observed; nothing here remembers or guesses.

`RoleState` condenses one role's Deployment and pods, `derive_status` turns the roles and the problems of this pass
into counts, conditions and a phase, and `status_patch` says what of it is news.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvasir_operator.api.conditions import (
    DEGRADING_REASONS,
    Condition,
    ConditionType,
    Reason,
    carry_over,
    severity,
)
from kvasir_operator.api.labels import REVISION_LABEL, ROLE_LABEL, ROLE_ROUTER, role_selector, selector_text
from kvasir_operator.kinds import KubeObject, is_terminating
from kvasir_operator.waiting import Waiting, is_ready, why_deployment_waits, why_pod_waits

_ROLE_ORDER = ("serve", "prefill", "decode", "router")
_NO_EVENTS: Mapping[str, Sequence[KubeObject]] = MappingProxyType({})
_STARTING_PODS = frozenset({Reason.LOADING_MODEL, Reason.INITIALIZING, Reason.STARTING_ROUTER})


@dataclass(frozen=True)
class RoleState:
    """One role. `desired` is what the Deployment asks for; `ready` counts pods of every revision."""

    role: str
    desired: int
    ready: int
    draining: int
    revision: str | None
    num_pods: int
    """Pods that exist and are not told to go."""
    num_old: int
    """Pods of earlier revisions that are not yet told to go."""
    is_settled: bool
    """The Deployment has exactly the wanted number of pods, all of the current revision."""
    waiting: Waiting | None
    """The worst that keeps a pod from being ready; None when enough pods are."""

    @property
    def is_ready(self) -> bool:
        return self.ready >= self.desired


def role_state(
    deployment: KubeObject, pods: Iterable[KubeObject], pod_events: Mapping[str, Sequence[KubeObject]] = _NO_EVENTS
) -> RoleState:
    """`deployment` may be a desired object that the API server refused: it then has no status.

    `pod_events` are the Events by name of the pod that they are about.
    """
    role = deployment["metadata"]["labels"][ROLE_LABEL]
    own = [pod for pod in pods if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == role]
    desired, status = deployment["spec"].get("replicas", 1), deployment.get("status", {})
    ready, updated, total = sum(map(is_ready, own)), status.get("updatedReplicas", 0), status.get("replicas", 0)
    seen = status.get("observedGeneration", -1) >= deployment["metadata"].get("generation", 0)
    is_settled = seen and total == updated == desired
    return RoleState(
        role=role,
        desired=desired,
        ready=ready,
        draining=sum(map(is_terminating, own)),
        revision=_revision(deployment["spec"]["template"]),
        num_pods=total,
        num_old=max(0, total - updated),
        is_settled=is_settled,
        waiting=None if ready >= desired and is_settled else _worst_wait(deployment, own, pod_events, desired),
    )


def _revision(template_or_pod: KubeObject) -> str | None:
    revision: str | None = template_or_pod["metadata"].get("labels", {}).get(REVISION_LABEL)
    return revision


def _worst_wait(
    deployment: KubeObject, pods: Sequence[KubeObject], events: Mapping[str, Sequence[KubeObject]], desired: int
) -> Waiting | None:
    # What an earlier revision's pods lack no longer matters once there are pods to replace them.
    current = [pod for pod in pods if _revision(pod) == _revision(deployment["spec"]["template"])] or pods
    pod_waits = (why_pod_waits(pod, events.get(pod["metadata"]["name"], ())) for pod in current)
    waits = [wait for wait in (why_deployment_waits(deployment), *pod_waits) if wait is not None]
    if waits:
        return min(waits, key=lambda wait: severity(wait.reason))
    if sum(map(is_ready, pods)) >= desired:
        return None
    name = deployment["metadata"]["name"]
    return Waiting(Reason.WAITING_FOR_PODS, f"Deployment {name}: {len(pods)} of {desired} pods made")


def derive_status(
    service: KubeObject,
    roles: Iterable[RoleState],
    problems: Sequence[Waiting],
    model_name: str,
    url: str | None,
    now: str,
) -> dict[str, Any]:
    """The status to show; `now` (RFC 3339) becomes the transition time of conditions whose status changes.

    `problems` are what this pass found besides waiting pods: an invalid spec, unsupported features, refused writes.
    """
    metadata, previous = service["metadata"], service.get("status", {})
    ordered = sorted(roles, key=lambda state: _ROLE_ORDER.index(state.role))
    conditions = _conditions(ordered, problems, model_name)
    engines = _engines(ordered)
    return {
        "observedGeneration": metadata["generation"],
        "url": url,
        "phase": _phase(conditions, engines),
        "replicas": sum(state.num_pods for state in engines),
        "selector": selector_text(role_selector(metadata["name"], engines[0].role)) if engines else None,
        "roles": [_role_entry(state) for state in ordered],
        "conditions": carry_over(previous.get("conditions", []), conditions, metadata["generation"], now),
    }


def status_patch(previous: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """What of `status` differs from what is stored; empty when nothing is to be written. None removes a field."""
    return {key: value for key, value in status.items() if previous.get(key) != value}


def _role_entry(state: RoleState) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "role": state.role,
        "desired": state.desired,
        "ready": state.ready,
        "draining": state.draining,
        "message": state.waiting.message if state.waiting else "",
    }
    return entry if state.revision is None else {**entry, "revision": state.revision}


def _engines(roles: Sequence[RoleState]) -> list[RoleState]:
    return [state for state in roles if state.role != ROLE_ROUTER]


def _conditions(roles: Sequence[RoleState], problems: Sequence[Waiting], model_name: str) -> list[Condition]:
    return [
        _ready(roles, problems, model_name),
        _model_loaded(roles, problems, model_name),
        _routable(roles, problems),
        _progressing(roles),
        _degraded(roles, problems),
    ]


def _ready(roles: Sequence[RoleState], problems: Sequence[Waiting], model_name: str) -> Condition:
    engines = _engines(roles)
    desired, ready = sum(state.desired for state in engines), sum(state.ready for state in engines)
    if engines and desired == 0:
        return Condition(ConditionType.READY, False, Reason.SCALED_TO_ZERO, "no replicas are wanted")
    if engines and all(state.is_ready for state in roles):
        message = f"{ready} of {desired} replicas serve {model_name}"
        return Condition(ConditionType.READY, True, Reason.ALL_ROLES_READY, message)
    wait = _worst([*_waits(roles), *problems])
    return Condition(ConditionType.READY, False, wait.reason, wait.message)


def _model_loaded(roles: Sequence[RoleState], problems: Sequence[Waiting], model_name: str) -> Condition:
    engines = _engines(roles)
    num_ready = sum(state.ready for state in engines)
    if num_ready:
        message = f"{num_ready} replicas have loaded {model_name}"
        return Condition(ConditionType.MODEL_LOADED, True, Reason.MODEL_LOADED, message)
    if engines and not any(state.desired for state in engines):
        return Condition(ConditionType.MODEL_LOADED, False, Reason.SCALED_TO_ZERO, "no replicas are wanted")
    wait = _worst([*_waits(engines), *problems])
    return Condition(ConditionType.MODEL_LOADED, False, wait.reason, wait.message)


def _routable(roles: Sequence[RoleState], problems: Sequence[Waiting]) -> Condition:
    routers = [state for state in roles if state.role == ROLE_ROUTER]
    num_routers = sum(state.ready for state in routers)
    if not num_routers:
        wait = _worst([*_waits(routers), *problems])
        return Condition(ConditionType.ROUTABLE, False, wait.reason, wait.message)
    if not any(state.ready for state in _engines(roles)):
        return Condition(ConditionType.ROUTABLE, False, Reason.NO_READY_ENGINE, "the router has no ready engine")
    return Condition(ConditionType.ROUTABLE, True, Reason.ROUTER_READY, f"{num_routers} routers are ready")


def _progressing(roles: Sequence[RoleState]) -> Condition:
    moving = [state for state in roles if not (state.is_settled and state.is_ready)]
    if not moving:
        return Condition(ConditionType.PROGRESSING, False, Reason.ROLLOUT_COMPLETE, "every pod is as the spec says")
    message = ", ".join(f"{state.role}: {state.ready} of {state.desired} ready" for state in moving)
    if any(state.num_old for state in moving):
        olds = ", ".join(f"{state.num_old} {state.role}" for state in moving if state.num_old)
        message = f"{message}; pods of earlier revisions left: {olds}"
        return Condition(ConditionType.PROGRESSING, True, Reason.ROLLOUT_IN_PROGRESS, message)
    is_scaling = all(state.ready for state in moving)
    return Condition(ConditionType.PROGRESSING, True, Reason.SCALING if is_scaling else Reason.STARTING, message)


def _degraded(roles: Sequence[RoleState], problems: Sequence[Waiting]) -> Condition:
    waits = [wait for wait in [*problems, *_waits(roles)] if wait.reason in DEGRADING_REASONS]
    if not waits:
        return Condition(ConditionType.DEGRADED, False, Reason.AS_EXPECTED, "")
    by_severity = sorted(waits, key=lambda wait: severity(wait.reason))
    message = "; ".join(dict.fromkeys(wait.message for wait in by_severity))
    return Condition(ConditionType.DEGRADED, True, by_severity[0].reason, message)


def _phase(conditions: Sequence[Condition], engines: Sequence[RoleState]) -> str:
    by_type = {condition.type: condition for condition in conditions}
    progressing, ready = by_type[ConditionType.PROGRESSING], by_type[ConditionType.READY]
    if by_type[ConditionType.DEGRADED].is_true:
        return "Degraded"
    if ready.reason is Reason.SCALED_TO_ZERO:
        return "Idle"
    if progressing.reason is Reason.ROLLOUT_IN_PROGRESS:
        return "Updating"
    if ready.is_true and not progressing.is_true:
        return "Ready"
    if any(state.ready for state in engines):
        return "Scaling"
    return "Loading" if ready.reason in _STARTING_PODS else "Pending"


def _waits(roles: Iterable[RoleState]) -> list[Waiting]:
    return [state.waiting for state in roles if state.waiting is not None]


def _worst(waits: Sequence[Waiting]) -> Waiting:
    nothing = Waiting(Reason.WAITING_FOR_PODS, "no pods yet")
    return min(waits, key=lambda wait: severity(wait.reason), default=nothing)
