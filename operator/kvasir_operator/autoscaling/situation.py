"""What a decision about one role rests on, and what it remembers from one to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir_operator.api.model import AutoscalingSpec
from kvasir_operator.autoscaling.behavior import Change, Recommendation
from kvasir_operator.autoscaling.capacity import Capacity
from kvasir_operator.autoscaling.demand import ScalingReason
from kvasir_operator.autoscaling.drain import Backlog
from kvasir_operator.autoscaling.forecast import History, PastNeed
from kvasir_operator.autoscaling.latency import Trial
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.desired.roles import EngineRoleName

COLD_SECONDS = 60.0
"""For so long after it became ready a replica's rates and latencies are those of a start, and it may have no series."""


def _warm(ready: Mapping[str, float]) -> frozenset[str]:
    return frozenset(name for name, seconds in ready.items() if seconds >= COLD_SECONDS)


@dataclass(frozen=True)
class RoleSituation:
    """`sample` None: Prometheus did not answer, and `trouble` says how. Seconds of `now` are Unix time."""

    role: EngineRoleName
    spec: AutoscalingSpec
    now: float
    current: int
    """Replicas wanted until now, those on their way included."""
    ready: Mapping[str, float]
    """Pods that take requests, with the seconds since they began to; of groups their first ones."""
    sample: RoleSample | None
    trouble: str = ""
    is_rolling: bool = False
    is_beginning: bool = False
    """Neither a router nor an engine has been ready for long enough to have series."""
    startup_seconds: float = 120.0
    """That a replica takes until it serves."""
    former_days: tuple[float, ...] = ()
    """Replicas that were needed on former days when a replica asked for now would serve."""
    turn_seconds: float = 0.0
    """Between turns of the loop; one pause alone does not make it longer."""
    slots: int | None = None
    """Requests that a replica computes at once; None: no matter how many."""
    routers: Mapping[str, float] = field(default_factory=dict)
    """Pods of the service's routers, or of the gateway, that take requests, with the seconds since they began to."""

    @property
    def warm(self) -> frozenset[str]:
        return _warm(self.ready)

    @property
    def warm_routers(self) -> frozenset[str]:
        return _warm(self.routers)

    @property
    def is_settled(self) -> bool:
        """All wanted replicas serve, and for long enough that latencies are theirs and not those of a start."""
        least_seconds = max(COLD_SECONDS, self.sample.window_seconds if self.sample else 0.0)
        return len(self.ready) == self.current and all(each >= least_seconds for each in self.ready.values())


@dataclass(frozen=True)
class Memory:
    """Of one role, in the operator's process alone: after it moved elsewhere windows begin anew."""

    recommendations: tuple[Recommendation, ...] = ()
    changes: tuple[Change, ...] = ()
    needs: tuple[PastNeed, ...] = ()
    """What lasted of demand, of the last minutes; `history` has the last hours."""
    history: History = field(default_factory=History)
    capacity: Capacity | None = None
    saturated_since: float | None = None
    """From when on no replica has kept up with what it was sent."""
    trial: Trial | None = None
    backlogs: tuple[Backlog, ...] = ()
    """Of the last two minutes."""
    queued_at: float | None = None
    """When prompts waited last for more than the SLO allows."""
    idle_since: float | None = None


class HoldReason(StrEnum):
    """Why nothing is decided; all but those of `EXPECTED_HOLDS` are faults that a condition shows."""

    METRICS_UNAVAILABLE = "MetricsUnavailable"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    DECISION_FAILED = "DecisionFailed"
    ROLLOUT = "RolloutInProgress"
    NOTHING_MEASURED = "NothingMeasured"


EXPECTED_HOLDS = frozenset({HoldReason.ROLLOUT, HoldReason.NOTHING_MEASURED})


@dataclass(frozen=True)
class Verdict:
    """`replicas` to want from now on. `held`: why nothing was decided; None where something was, even to stay."""

    replicas: int
    reason: ScalingReason | None
    message: str
    needed: float | None = None
    """By demand alone: a forecast of former days must not be what tomorrow's rests on."""
    held: HoldReason | None = None

    @property
    def is_faulty(self) -> bool:
        """Held for what somebody should mend, and not for a rollout that will end."""
        return self.held is not None and self.held not in EXPECTED_HOLDS
