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
    """Reasons of all conditions."""

    INVALID_SPEC = "InvalidSpec"
    WORKLOAD_DELETED = "WorkloadDeleted"
    ADMISSION_FAILED = "AdmissionFailed"
    APPLY_FAILED = "ApplyFailed"
    FIELDS_CONTESTED = "FieldsContested"
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
    UNSUPPORTED_FEATURE = "UnsupportedFeature"
    MODEL_NAME_TAKEN = "ModelNameTaken"
    NODE_AVOIDED = "NodeAvoided"
    LEADER_WORKER_SETS_REMOVED = "LeaderWorkerSetsRemoved"
    NO_READY_PREFILL = "NoReadyPrefill"

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
    ROLLOUT_HALTED = "RolloutHalted"
    ROLLOUT_COMPLETE = "RolloutComplete"
    STARTING = "Starting"
    SCALING = "Scaling"
    AS_EXPECTED = "AsExpected"

    FOLLOWING_DEMAND = "FollowingDemand"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    METRICS_STALE = "MetricsStale"
    METRICS_MISSING = "MetricsMissing"
    DECISION_FAILED = "DecisionFailed"


DOWNLOAD_FAILURES: Final = (
    Reason.MODEL_NOT_FOUND,
    Reason.MODEL_ACCESS_DENIED,
    Reason.MODEL_CORRUPT,
    Reason.DISK_FULL,
    Reason.CACHE_UNAVAILABLE,
    Reason.DOWNLOAD_STALLED,
    Reason.SOURCE_UNREACHABLE,
)
"""As the loaders of models name them; worst first."""
# Worst first: of several reasons for one condition the first of all these is shown.
_FAILURES: Final = (
    Reason.INVALID_SPEC,
    Reason.WORKLOAD_DELETED,
    Reason.ADMISSION_FAILED,
    Reason.APPLY_FAILED,
    Reason.FIELDS_CONTESTED,
    Reason.NAME_TAKEN,
    Reason.QUOTA_EXCEEDED,
    Reason.POD_CREATION_FAILED,
    Reason.INVALID_CONTAINER_CONFIG,
    *DOWNLOAD_FAILURES,
    Reason.SECRET_NOT_FOUND,
    Reason.VOLUME_UNAVAILABLE,
    Reason.IMAGE_PULL_FAILED,
    Reason.GROUP_RESTARTS_EXHAUSTED,
    Reason.CRASH_LOOPING,
    Reason.CONTAINER_FAILED,
    Reason.POD_FAILED,
    Reason.GROUP_RESTARTED,
)
_WAITS: Final = (
    Reason.SCHEDULING_GATED,
    Reason.INSUFFICIENT_CAPACITY,
    Reason.NODE_NOT_READY,
    Reason.READINESS_GATE_CLOSED,
    Reason.SIDECAR_NOT_READY,
    Reason.NOT_RESPONDING,
    Reason.PULLING_IMAGE,
    Reason.INITIALIZING,
    Reason.DOWNLOADING_MODEL,
    Reason.LOADING_MODEL,
    Reason.GATEWAY_NOT_READY,
    Reason.STARTING_ROUTER,
    Reason.WAITING_FOR_PODS,
)
# Beside these, pods run: as an answer to why one does not, anything else says more.
_LIMITATIONS: Final = (
    Reason.ROLLOUT_HALTED,
    Reason.FIELDS_CONTESTED,
    Reason.UNSUPPORTED_FEATURE,
    Reason.MODEL_NAME_TAKEN,
    Reason.NODE_AVOIDED,
    Reason.LEADER_WORKER_SETS_REMOVED,
    Reason.NO_READY_PREFILL,
)
DEGRADING_REASONS: Final = (*_FAILURES, *_LIMITATIONS)
"""Waiting alone seldom mends these."""
_SEVERITY: Final = {reason: rank for rank, reason in enumerate((*_FAILURES, *_WAITS, *_LIMITATIONS))}
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
