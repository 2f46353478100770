"""Metadata of a child object: its name, labels and owner."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService


def metadata(
    service: InferenceService, name: str, role: str | None, extra_labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """`metadata` of a child; with an owner reference where the service has a uid, so that deleting it cleans up.

    `role`: None for what several roles share.
    """
    own_labels = labels.service_labels(service.name) if role is None else labels.role_labels(service.name, role)
    result: dict[str, Any] = {
        "name": name,
        "namespace": service.namespace,
        "labels": {**own_labels, **(extra_labels or {})},
    }
    if service.uid is not None:
        result["ownerReferences"] = [_owner_reference(service, service.uid)]
    return result


def _owner_reference(service: InferenceService, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "name": service.name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
