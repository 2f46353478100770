"""The conditions of an InferenceService: their types, the fixed list of reasons, and how they are carried over.

A reason tells a person or an alert why the service is where it is; tools may match on it, so none is ever reworded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class ConditionType(StrEnum):
    READY = "Ready"
    """A request is served now, or after the wake that it causes; how many pods there are is Progressing's to say."""
    MODEL_LOADED = "ModelLoaded"
    """At least one engine pod has the model loaded."""
    ROUTABLE = "Routable"
    """A request to the service's URL reaches an engine."""
    PROGRESSING = "Progressing"
    """The operator or Kubernetes is still bringing the pods to what the spec says."""
    DEGRADED = "Degraded"
    """Something failed that seldom mends by waiting; false again once it no longer holds a pod up."""
    SCALING_ACTIVE = "ScalingActive"
    """The replicas of autoscaled roles follow demand; false while it cannot be told, mostly for want of metrics."""


class Reason(StrEnum):
    """Reasons of all conditions, worst first: of several for one condition the first of these is shown."""

    # Failures.
    INVALID_SPEC = "InvalidSpec"
    WORKLOAD_DELETED = "WorkloadDeleted"
    ADMISSION_FAILED = "AdmissionFailed"
    APPLY_FAILED = "ApplyFailed"
    NAME_TAKEN = "NameTaken"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_CREATION_FAILED = "PodCreationFailed"
    INVALID_CONTAINER_CONFIG = "InvalidContainerConfig"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_ACCESS_DENIED = "ModelAccessDenied"
    MODEL_CORRUPT = "ModelCorrupt"
    DISK_FULL = "DiskFull"
    CACHE_UNAVAILABLE = "CacheUnavailable"
    DOWNLOAD_STALLED = "DownloadStalled"
    SOURCE_UNREACHABLE = "SourceUnreachable"
    SECRET_NOT_FOUND = "SecretNotFound"
    VOLUME_UNAVAILABLE = "VolumeUnavailable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    GROUP_RESTARTS_EXHAUSTED = "GroupRestartsExhausted"
    CRASH_LOOPING = "CrashLooping"
    CONTAINER_FAILED = "ContainerFailed"
    POD_FAILED = "PodFailed"
    GROUP_RESTARTED = "GroupRestarted"

    # Waits.
    SCHEDULING_GATED = "SchedulingGated"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    NODE_NOT_READY = "NodeNotReady"
    READINESS_GATE_CLOSED = "ReadinessGateClosed"
    SIDECAR_NOT_READY = "SidecarNotReady"
    NOT_RESPONDING = "NotResponding"
    PULLING_IMAGE = "PullingImage"
    INITIALIZING = "Initializing"
    DOWNLOADING_MODEL = "DownloadingModel"
    LOADING_MODEL = "LoadingModel"
    GATEWAY_NOT_READY = "GatewayNotReady"
    STARTING_ROUTER = "StartingRouter"
    WAITING_FOR_PODS = "WaitingForPods"

    # Limitations, beside which pods run: as an answer to why one does not, anything else says more.
    ROLLOUT_HALTED = "RolloutHalted"
    FIELDS_CONTESTED = "FieldsContested"
    UNSUPPORTED_FEATURE = "UnsupportedFeature"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    NODE_AVOIDED = "NodeAvoided"
    LEADER_WORKER_SETS_REMOVED = "LeaderWorkerSetsRemoved"
    NO_READY_PREFILL = "NoReadyPrefill"

    # Never compared with others.
    SERVING = "Serving"
    IDLE = "Idle"
    SUSPENDED = "Suspended"
    MODEL_LOADED = "ModelLoaded"
    CONTEXT_CUT = "ContextCut"
    ROUTER_READY = "RouterReady"
    GATEWAY_READY = "GatewayReady"
    NO_READY_ENGINE = "NoReadyEngine"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    ROLLOUT_WAITING = "RolloutWaiting"
    ROLLOUT_PAUSED = "RolloutPaused"
    ROLLOUT_COMPLETE = "RolloutComplete"
    STARTING = "Starting"
    SCALING = "Scaling"
    AS_EXPECTED = "AsExpected"
    FOLLOWING_DEMAND = "FollowingDemand"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    DECISION_FAILED = "DecisionFailed"


def _from_to(first: Reason, last: Reason) -> tuple[Reason, ...]:
    reasons = list(Reason)
    return tuple(reasons[reasons.index(first) : reasons.index(last) + 1])


DOWNLOAD_FAILURES: Final = _from_to(Reason.MODEL_NOT_FOUND, Reason.SOURCE_UNREACHABLE)
"""As the loaders of models name them."""
DEGRADING_REASONS: Final = (
    *_from_to(Reason.INVALID_SPEC, Reason.GROUP_RESTARTED),
    *_from_to(Reason.ROLLOUT_HALTED, Reason.NO_READY_PREFILL),
)
"""Failures and limitations: waiting alone seldom mends these."""
_SEVERITY: Final = {reason: rank for rank, reason in enumerate(Reason)}
_MAX_MESSAGE_LENGTH = 4096  # characters; a status must stay small however much a pod has to say


def severity(reason: Reason) -> int:
    """Lower is worse: of several reasons, the one with the lowest number is shown. Of failures and waits only."""
    return _SEVERITY[reason]


@dataclass(frozen=True)
class Condition:
    type: ConditionType
    is_true: bool
    reason: Reason
    message: str


def carry_over(
    previous: Iterable[dict[str, Any]], current: Iterable[Condition], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions as the status holds them; `lastTransitionTime` changes to `now` (RFC 3339) only with the status."""
    before = {condition["type"]: condition for condition in previous}
    return [_carry_over_one(before.get(condition.type), condition, generation, now) for condition in current]


def _carry_over_one(before: dict[str, Any] | None, condition: Condition, generation: int, now: str) -> dict[str, Any]:
    status = "True" if condition.is_true else "False"
    unchanged = before is not None and before.get("status") == status
    return {
        "type": condition.type.value,
        "status": status,
        "reason": condition.reason.value,
        "message": condition.message[:_MAX_MESSAGE_LENGTH],
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and unchanged else now,
    }


def find_condition(conditions: Iterable[dict[str, Any]], wanted: ConditionType) -> dict[str, Any] | None:
    return next((condition for condition in conditions if condition["type"] == wanted), None)
