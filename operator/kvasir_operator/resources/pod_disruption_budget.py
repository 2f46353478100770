"""The rule for voluntary disruption: node drains take one pod of a role at a time.

A role of one pod gets no budget: it would only block node drains without keeping the service up.
"""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.resources.metadata import metadata


def pod_disruption_budget(service: InferenceService, name: str, role: str, replicas: int) -> dict[str, Any] | None:
    """None where the role is too small to be protected."""
    if replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, name, role),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": labels.role_selector(service.name, role)},
            # A pod that never became ready must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
