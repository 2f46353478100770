"""Why replicas are changed or left; shown in status.scaling, events and metrics, so none is ever reworded."""

from enum import StrEnum


class ScalingReason(StrEnum):
    KV_CACHE_DEMAND = "KVCacheDemand"
    BUSIEST_REPLICA = "BusiestReplica"
    SLOT_DEMAND = "SlotDemand"
    PREFILL_DEMAND = "PrefillDemand"
    TIME_TO_FIRST_TOKEN = "TimeToFirstToken"
    INTER_TOKEN_LATENCY = "InterTokenLatency"
    FORECAST = "Forecast"
    LOW_DEMAND = "LowDemand"
    HELD_REQUESTS = "HeldRequests"
    OTHER_ROLE_BUSY = "OtherRoleBusy"
    IDLE = "Idle"
    BOUNDS = "ReplicaBounds"


class HoldReason(StrEnum):
    """Why nothing is decided; all but those of `EXPECTED_HOLDS` are faults that a condition shows."""

    METRICS_UNAVAILABLE = "MetricsUnavailable"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    DECISION_FAILED = "DecisionFailed"
    ROLLOUT = "RolloutInProgress"
    NOTHING_MEASURED = "NothingMeasured"


EXPECTED_HOLDS = frozenset({HoldReason.ROLLOUT, HoldReason.NOTHING_MEASURED})
