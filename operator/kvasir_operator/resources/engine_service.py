"""A headless Service an engine role and revision: its EndpointSlices show the router which pods are ready."""

from typing import Any

from kvasir_operator.api import labels
from kvasir_operator.api.model import InferenceService
from kvasir_operator.desired.roles import EngineRole
from kvasir_operator.resources.metadata import metadata


def engine_service(
    service: InferenceService, role: EngineRole, revision: str, traffic_weight: int | None
) -> dict[str, Any]:
    """`traffic_weight`: per cent of the requests for this revision; None: its part by the router's policy.

    Of a group of pods it has only the one that takes requests.

    Labels go on to the EndpointSlices, where the router reads them; annotations would not. The weight is both: without
    the label alone a revision that is weighed would pass for one that was let go on.
    """
    name = labels.workload_name(service.name, role.name, revision)
    leader = {labels.RANK_LABEL: "0"} if role.is_grouped else {}
    weight = {} if traffic_weight is None else {labels.TRAFFIC_WEIGHT: str(traffic_weight)}
    described = metadata(service, name, role.name, {labels.REVISION_LABEL: revision, **weight})
    described |= {"annotations": weight} if weight else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": described,
        "spec": {
            "clusterIP": "None",
            "ipFamilyPolicy": "PreferDualStack",
            "publishNotReadyAddresses": False,
            "selector": {**labels.revision_selector(service.name, role.name, revision), **leader},
            "ports": [{"name": "http", "port": labels.ENGINE_HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
