"""Spreads a role's pods over nodes, then zones, without keeping a pod waiting for it."""

from typing import Any

from kvasir_operator.api import labels


def topology_spread(service_name: str, role: str) -> list[dict[str, Any]]:
    """Counted per pod template, so that a rollout's old pods do not push the new ones together."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels.role_selector(service_name, role)},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
    ]
