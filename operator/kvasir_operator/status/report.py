"""Writes a service's status where it changed.

By server-side apply, so that conditions are a map by type: those of other controllers stay, and what we leave out goes.
It is for the object as the pass read it: neither a namesake that was made since then nor a changed spec gets what was
seen of its predecessor. The next pass then reports; a changed label or annotation alone would wake nobody.
"""

import logging
from typing import Any

from kvasir_operator.api.conditions import find_condition
from kvasir_operator.errors import ObjectConflictError, ObjectNotFoundError
from kvasir_operator.kube.client import KubeClient
from kvasir_operator.kube.kinds import INFERENCE_SERVICE, KubeObject

logger = logging.getLogger(__name__)

_OURS = ("observedGeneration", "phase", "url", "ready", "replicas", "selector", "roles", "conditions", "scaling")


async def report_status(client: KubeClient, service: KubeObject, status: dict[str, Any]) -> bool:
    """Whether it stands as `status` says. `service` is the object as the pass read it. Raises KubeApiError."""
    if not is_news(service.get("status", {}), status):
        return True
    metadata = service["metadata"]
    try:
        await client.apply_status(
            {
                "apiVersion": INFERENCE_SERVICE.api_version,
                "kind": INFERENCE_SERVICE.kind,
                "metadata": {key: metadata[key] for key in ("name", "namespace", "resourceVersion")},
                "status": status,
            }
        )
    except (ObjectNotFoundError, ObjectConflictError) as error:
        logger.info("%s/%s: changed during its pass: %s", metadata["namespace"], metadata["name"], error)
        return False
    return True


def differs_in_detail(previous: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether there is news, but of counts, reasons and messages alone: what anybody waits for stands as it was."""
    return is_news(previous, status) and _headline(previous, status) == _headline(status, status)


def _headline(stored: dict[str, Any], status: dict[str, Any]) -> Any:
    """Of `stored`, as far as `status` says anything of it."""
    conditions = [find_condition(stored.get("conditions", []), each["type"]) or {} for each in status["conditions"]]
    return (
        [stored.get(key) for key in ("observedGeneration", "url", "scaling")],
        {entry["role"]: entry.get("revision") for entry in stored.get("roles", [])},
        [each.get("status") for each in conditions],
    )


def is_news(previous: dict[str, Any], status: dict[str, Any]) -> bool:
    """Whether anything of ours differs from what is stored; conditions of other controllers do not matter."""
    others = [key for key in _OURS if key != "conditions"]
    return any(previous.get(key) != status.get(key) for key in others) or any(
        find_condition(previous.get("conditions", []), condition["type"]) != condition
        for condition in status["conditions"]
    )
