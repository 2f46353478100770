"""What a pass knows of a service besides its pods."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_operator.autoscaling.ledger import ServiceScaling
from kvasir_operator.observe.gateway_state import GatewayState
from kvasir_operator.observe.waiting import Waiting
from kvasir_operator.rollout.plan import RolloutState


@dataclass(frozen=True)
class Situation:
    """`problems` are what this pass found: an invalid spec, unsupported features, refused writes, contested fields."""

    model_name: str
    problems: Sequence[Waiting] = ()
    rollout: RolloutState | None = None
    """None where the spec is invalid, so that nothing was planned."""
    blocked: str | None = None
    """Why no engine of the current revision may be started."""
    is_suspended: bool = False
    gateway: GatewayState | None = None
    """None where requests come through a router of the service's own."""
    scaling: ServiceScaling | None = None
    """What was decided of the replicas of autoscaled roles; None where none is."""
