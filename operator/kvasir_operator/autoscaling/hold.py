"""When nothing is decided: while what is measured is missing, stale or of too few replicas."""

from kvasir_operator.autoscaling.reasons import HoldReason
from kvasir_operator.autoscaling.sample import RoleSample
from kvasir_operator.autoscaling.situation import RoleSituation

STALE_SECONDS = 90.0
"""Three scrapes of the usual length."""


def why_held(situation: RoleSituation) -> tuple[HoldReason, str] | None:
    sample = situation.sample
    if sample is None and situation.is_beginning:
        return HoldReason.NOTHING_MEASURED, situation.trouble
    if sample is None:
        return HoldReason.METRICS_UNAVAILABLE, situation.trouble
    age = situation.now - sample.at
    if age > STALE_SECONDS:
        return HoldReason.METRICS_STALE, f"the newest sample is {age:.0f} s old, expected at most {STALE_SECONDS:g} s"
    missing = _missing(situation, sample)
    if missing and situation.current:  # at zero those that are warm still are on their way out
        reason = HoldReason.NOTHING_MEASURED if situation.is_beginning else HoldReason.METRICS_MISSING
        return reason, f"Prometheus has no series of {', '.join(missing)}"
    return None


def _missing(situation: RoleSituation, sample: RoleSample) -> list[str]:
    engines = situation.warm - {replica.name for replica in sample.replicas}
    return [*sorted(engines), *sorted(situation.warm_routers - sample.routers), *sample.lacking]
