"""When nothing is decided: during a rollout, and while what is measured is missing, stale or of too few replicas."""

from kvasir_operator.autoscaling.reasons import HoldReason
from kvasir_operator.autoscaling.situation import RoleSituation

STALE_SECONDS = 90.0
"""Three scrapes of the usual length."""


def why_held(situation: RoleSituation) -> tuple[HoldReason, str] | None:
    sample = situation.sample
    if situation.is_rolling:
        return HoldReason.ROLLOUT, "a rollout is in progress"
    if sample is None and situation.is_beginning:
        return HoldReason.NOTHING_MEASURED, situation.trouble
    if sample is None:
        return HoldReason.METRICS_UNAVAILABLE, situation.trouble
    age = situation.now - sample.at
    if age > STALE_SECONDS:
        return HoldReason.METRICS_STALE, f"the newest sample is {age:.0f} s old, expected at most {STALE_SECONDS:g} s"
    missing = sorted(situation.warm - {replica.name for replica in sample.replicas})
    if missing and situation.current:  # at zero those that are warm still are on their way out
        return HoldReason.METRICS_MISSING, f"Prometheus has no series of {', '.join(missing)}"
    return None
