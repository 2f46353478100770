"""The conditions of a service, one function each, from its roles and its situation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvasir_operator.api.conditions import DEGRADING_REASONS, Condition, ConditionType, Reason, severity
from kvasir_operator.api.labels import ROLE_PREFILL
from kvasir_operator.autoscaling.ledger import ServiceScaling
from kvasir_operator.observe.model_names import GatewayState
from kvasir_operator.observe.replicas import EngineContext
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.rollout.goal import RolloutPhase
from kvasir_operator.rollout.plan import RolloutPlan
from kvasir_operator.status.roles import RoleState


@dataclass(frozen=True)
class Situation:
    """`problems` are what this pass found: an invalid spec, unsupported features, refused writes, contested fields."""

    model_name: str
    problems: Sequence[Waiting] = ()
    rollout: RolloutPlan | None = None
    """None where the spec is invalid, so that nothing was planned."""
    blocked: str | None = None
    """Why no engine of the current revision may be started."""
    is_suspended: bool = False
    gateway: GatewayState | None = None
    """None where requests come through a router of the service's own."""
    scaling: ServiceScaling | None = None
    """What was decided of the replicas of autoscaled roles; None where none is."""
    cut_context: EngineContext | None = None
    """The shortest of the engines' that is shorter than the model's."""


def service_conditions(roles: Sequence[RoleState], situation: Situation) -> list[Condition]:
    """In the order in which they are shown; Ready comes first."""
    return [
        _ready(roles, situation),
        _model_loaded(roles, situation),
        _routable(roles, situation),
        _progressing(roles, situation),
        _degraded(roles, situation),
        *_scaling_active(situation),
    ]


def engines_of(roles: Iterable[RoleState]) -> list[RoleState]:
    return [state for state in roles if state.is_engine]


def _routers(roles: Iterable[RoleState]) -> list[RoleState]:
    return [state for state in roles if not state.is_engine]


def _ready(roles: Sequence[RoleState], situation: Situation) -> Condition:
    engines = engines_of(roles)
    if situation.is_suspended:
        return Condition(ConditionType.READY, False, Reason.SUSPENDED, "spec.suspend is true")
    if _is_reachable(roles, situation) and _can_serve(engines):
        ready, desired = sum(state.ready for state in engines), sum(state.desired for state in engines)
        message = f"{ready} of {desired} replicas serve {situation.model_name}"
        return Condition(ConditionType.READY, True, Reason.SERVING, message)
    if _is_reachable(roles, situation) and _is_idle(engines, situation):
        if situation.scaling is None:
            text = "replicas is 0 and nothing scales the service: a request would wake nothing"
            return Condition(ConditionType.READY, False, Reason.IDLE, text)
        return Condition(ConditionType.READY, True, Reason.IDLE, "no replicas are wanted; a request wakes the service")
    lacking = _lacking(roles)
    return _not(ConditionType.READY, _why_not_serving(lacking, situation))


def _is_reachable(roles: Sequence[RoleState], situation: Situation) -> bool:
    """By the gateway under a name of its own, or by a router of its own, which the gateway may be about to replace."""
    is_behind_gateway = situation.gateway is not None and situation.gateway.serves
    return is_behind_gateway or any(state.ready for state in _routers(roles))


def _can_serve(engines: Sequence[RoleState]) -> bool:
    """Prefill alone does not answer; decode without it computes prompts too, more slowly."""
    return any(state.ready for state in engines if state.role != ROLE_PREFILL)


def _is_idle(engines: Sequence[RoleState], situation: Situation) -> bool:
    """At zero because the spec wants it so, and woken by a request: not by one where no engine may start."""
    is_valid = all(problem.reason is not Reason.INVALID_SPEC for problem in situation.problems)
    can_wake = is_valid and situation.blocked is None
    return bool(engines) and can_wake and not any(state.desired for state in engines)


def _lacking(roles: Sequence[RoleState]) -> Sequence[RoleState]:
    """The roles without which nothing is served; all, where each has something."""
    lacking = [state for state in roles if state.desired and not state.ready]
    return [state for state in lacking if state.role != ROLE_PREFILL] or lacking or roles


def _why_not_serving(lacking: Sequence[RoleState], situation: Situation) -> Waiting:
    if situation.blocked is not None and any(state.is_engine for state in lacking):
        return Waiting(Reason.UNSUPPORTED_FEATURE, situation.blocked)
    found, unwanted = [*_waits(lacking), *situation.problems], [state.role for state in lacking if not state.desired]
    if unwanted and not found:
        return Waiting(Reason.IDLE, f"the manifest wants no replicas of {', '.join(unwanted)}")
    return _refusal(situation) or _worst(found)


def _refusal(situation: Situation) -> Waiting | None:
    """Where the gateway knows the service by no name, whatever its engines do."""
    if situation.gateway is None or not situation.gateway.is_refused:
        return None
    return next((each for each in situation.problems if each.reason is Reason.MODEL_NAME_TAKEN), None)


def _model_loaded(roles: Sequence[RoleState], situation: Situation) -> Condition:
    engines = engines_of(roles)
    if num_ready := sum(state.ready for state in engines):
        message = f"{num_ready} replicas have loaded {situation.model_name}"
        if situation.cut_context is not None:
            reason, message = Reason.CONTEXT_CUT, f"{message}; {_cut(situation.cut_context)}"
        else:
            reason = Reason.MODEL_LOADED
        return Condition(ConditionType.MODEL_LOADED, True, reason, message)
    return _no_engine(ConditionType.MODEL_LOADED, engines, situation) or _not(
        ConditionType.MODEL_LOADED, _why_not_serving(engines, situation)
    )


def _cut(context: EngineContext) -> str:
    return (
        f"a request may have {context.num_tokens} tokens of the model's {context.cut_from}, as the KV cache has memory "
        "for no more: give it more (resources.memory, engine.memoryUtilization, parallelism.tensor), or write "
        f"engine.maxModelLen: {context.num_tokens} where that is enough"
    )


def _routable(roles: Sequence[RoleState], situation: Situation) -> Condition:
    engines, routers = engines_of(roles), _routers(roles)
    if situation.is_suspended:
        return Condition(ConditionType.ROUTABLE, False, Reason.SUSPENDED, "spec.suspend is true")
    if not _is_reachable(roles, situation):
        refusal = _refusal(situation)
        return _not(ConditionType.ROUTABLE, refusal or _worst([*_waits(routers), *situation.problems]))
    if _can_serve(engines):
        return _reached(routers, situation)
    return _no_engine(ConditionType.ROUTABLE, engines, situation) or Condition(
        ConditionType.ROUTABLE, False, Reason.NO_READY_ENGINE, "no engine is ready"
    )


def _reached(routers: Sequence[RoleState], situation: Situation) -> Condition:
    if situation.gateway is not None and situation.gateway.serves:
        own = ", ".join(name for name in situation.gateway.names if name not in situation.gateway.taken)
        return Condition(ConditionType.ROUTABLE, True, Reason.GATEWAY_READY, f"the gateway is ready and serves {own}")
    message = f"{sum(state.ready for state in routers)} routers are ready"
    return Condition(ConditionType.ROUTABLE, True, Reason.ROUTER_READY, message)


def _no_engine(wanted: ConditionType, engines: Sequence[RoleState], situation: Situation) -> Condition | None:
    """Where no engine is wanted."""
    if situation.is_suspended:
        return Condition(wanted, False, Reason.SUSPENDED, "spec.suspend is true")
    if _is_idle(engines, situation):
        return Condition(wanted, False, Reason.IDLE, "no replicas are wanted")
    return None


def _progressing(roles: Sequence[RoleState], situation: Situation) -> Condition:
    moving = [state for state in roles if not (state.is_settled and state.is_ready)]
    if (held := _held(situation)) is not None:
        return _not(ConditionType.PROGRESSING, held)
    if not moving:
        if situation.is_suspended:
            return Condition(ConditionType.PROGRESSING, False, Reason.SUSPENDED, "no pods are left")
        return Condition(ConditionType.PROGRESSING, False, Reason.ROLLOUT_COMPLETE, "every pod is as the spec says")
    message = ", ".join(f"{state.role}: {state.ready} of {state.desired} ready" for state in moving)
    if any(state.num_former for state in moving):
        former = ", ".join(f"{state.num_former} {state.role}" for state in moving if state.num_former)
        waits = "".join(f"; {wait.message}" for wait in _waits(moving))
        message = f"{message}{waits}; pods of former revisions left: {former}"
        return Condition(ConditionType.PROGRESSING, True, Reason.ROLLOUT_IN_PROGRESS, message)
    is_scaling = all(state.ready for state in moving)
    return Condition(ConditionType.PROGRESSING, True, Reason.SCALING if is_scaling else Reason.STARTING, message)


def _held(situation: Situation) -> Waiting | None:
    """Why the operator goes no further by itself."""
    rollout = situation.rollout
    if rollout is not None and rollout.phase is RolloutPhase.HALTED:
        return Waiting(Reason.ROLLOUT_HALTED, _halted_message(rollout))
    if rollout is not None and rollout.phase is RolloutPhase.WAITING:
        turn = f"revision {rollout.revision} waits for its turn: the engines of other services are being replaced"
        return Waiting(Reason.ROLLOUT_WAITING, f"{turn} (chart value operator.maxUpgrades)")
    if rollout is not None and rollout.phase is RolloutPhase.PAUSED:
        share = f"revision {rollout.revision} gets {rollout.traffic_weight} % of the requests"
        return Waiting(Reason.ROLLOUT_PAUSED, f"{share} until rollout.canary.pause is false")
    if situation.blocked is not None:
        return Waiting(Reason.UNSUPPORTED_FEATURE, situation.blocked)
    return None


def _halted_message(rollout: RolloutPlan) -> str:
    return f"revision {rollout.revision} does not become ready, former pods serve on: {rollout.trouble}"


def _degraded(roles: Sequence[RoleState], situation: Situation) -> Condition:
    found = [*situation.problems, *_waits(roles), *_missing_prefill(engines_of(roles))]
    waits = [wait for wait in found if wait.reason in DEGRADING_REASONS]
    rollout = situation.rollout
    if not waits and rollout is not None and rollout.phase is RolloutPhase.HALTED:
        waits = [Waiting(Reason.ROLLOUT_HALTED, _halted_message(rollout))]
    if not waits:
        return Condition(ConditionType.DEGRADED, False, Reason.AS_EXPECTED, "")
    by_severity = sorted(waits, key=lambda wait: severity(wait.reason))
    message = "; ".join(dict.fromkeys(wait.message for wait in by_severity))
    return Condition(ConditionType.DEGRADED, True, by_severity[0].reason, message)


def _scaling_active(situation: Situation) -> list[Condition]:
    """Of an autoscaled service only."""
    if situation.scaling is None or situation.is_suspended:
        return []
    if situation.scaling.trouble is not None:
        return [_not(ConditionType.SCALING_ACTIVE, situation.scaling.trouble)]
    return [Condition(ConditionType.SCALING_ACTIVE, True, Reason.FOLLOWING_DEMAND, "replicas follow demand")]


def _missing_prefill(engines: Sequence[RoleState]) -> list[Waiting]:
    missing = [state for state in engines if state.role == ROLE_PREFILL and state.desired and not state.ready]
    if not missing or not _can_serve(engines):
        return []
    return [Waiting(Reason.NO_READY_PREFILL, "no prefill pod is ready: decode pods compute the prompts too")]


def _waits(roles: Iterable[RoleState]) -> list[Waiting]:
    return [state.waiting for state in roles if state.waiting is not None]


def _worst(waits: Sequence[Waiting]) -> Waiting:
    nothing = Waiting(Reason.WAITING_FOR_PODS, "no pods yet")
    return min(waits, key=lambda wait: severity(wait.reason), default=nothing)


def _not(wanted: ConditionType, wait: Waiting) -> Condition:
    return Condition(wanted, False, wait.reason, wait.message)
