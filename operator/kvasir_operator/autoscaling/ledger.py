"""What was decided for each service and is still to be carried out and reported: written by the loop, read by passes.

A pass that finds nothing here goes by the service's own status, so that a new leader goes on where the last one was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir_operator.api.conditions import Reason
from kvasir_operator.autoscaling.situation import Verdict
from kvasir_operator.kube.kinds import KubeObject, ServiceKey
from kvasir_operator.observe.waiting import Waiting

MAX_ENTRIES = 10
"""Of decisions that a status shows."""


@dataclass(frozen=True)
class ServiceScaling:
    """`verdicts`: the latest, by role. `entries`: decisions that changed something, as status.scaling holds them."""

    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    entries: tuple[dict[str, Any], ...] = ()

    @property
    def replicas(self) -> dict[str, int]:
        return {role: verdict.replicas for role, verdict in self.verdicts.items()}

    @property
    def trouble(self) -> Waiting | None:
        """Of the first role that is held for a fault."""
        for role, verdict in self.verdicts.items():
            if verdict.held is not None and verdict.is_faulty:
                return Waiting(Reason(verdict.held), f"{role} stays at {verdict.replicas}: {verdict.message}")
        return None


class ScalingLedger:
    def __init__(self) -> None:
        self._services: dict[ServiceKey, ServiceScaling] = {}

    def scaling_of(self, key: ServiceKey) -> ServiceScaling:
        return self._services.get(key, ServiceScaling())

    def record(self, key: ServiceKey, scaling: ServiceScaling) -> None:
        self._services[key] = scaling

    def forget(self, key: ServiceKey) -> None:
        self._services.pop(key, None)


def replicas_by_role(scaling: ServiceScaling, service: KubeObject) -> dict[str, int]:
    """As decided last, here or by whoever wrote the status."""
    roles = service.get("status", {}).get("roles", [])
    return {entry["role"]: entry["desired"] for entry in roles} | scaling.replicas


def merged_entries(former: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last ten, oldest first; one that is there already is not added again."""
    return [*former, *(entry for entry in new if entry not in former)][-MAX_ENTRIES:]


def entry_of(role: str, before: int, verdict: Verdict, now: str) -> dict[str, Any]:
    reason = "" if verdict.reason is None else verdict.reason.value
    changed = {"from": before, "to": verdict.replicas}
    return {"time": now, "role": role, **changed, "reason": reason, "message": verdict.message}
