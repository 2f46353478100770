"""The rule for voluntary disruption: node drains take one pod of a role at a time, of whichever revision, and of many a
tenth.

A role of one pod gets no budget: it would only block node drains without keeping the service up.
"""

from typing import Any, Final

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import Role
from kvasir_operator.resources.metadata import metadata

_TENTH: Final = "10%"
"""Kubernetes rounds it up."""


def pod_disruption_budget(service: InferenceService, role: Role) -> dict[str, Any] | None:
    """None where the role is too small to be protected."""
    if role.replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, labels.role_name(service.name, role.name), role.name),
        "spec": {
            # Of a group each pod takes the others along.
            "maxUnavailable": _TENTH if role.replicas > 10 and not role.is_grouped else 1,
            "selector": {"matchLabels": labels.role_selector(service.name, role.name)},
            # A pod that never became ready must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
