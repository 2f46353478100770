"""Pods as Prometheus' own discovery would show them, which Debian builds it without: a target for each port.

The labels are those of `kubernetes_sd_configs` with role `pod`, as far as monitors can ask for them. Pure functions.
"""

import re
from typing import Any

from e2e.cluster.rig.network import in_url

KubeObject = dict[str, Any]
TargetGroup = dict[str, Any]
META = "__meta_kubernetes"


def target_groups(pods: list[KubeObject]) -> list[TargetGroup]:
    """In the form of `file_sd_configs`; a pod without an address has none."""
    return [
        {
            "targets": [f"{in_url(pod['status']['podIP'])}:{port['containerPort']}"],
            "labels": port_labels(pod, container, port),
        }
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["uid"]))
        if "podIP" in pod["status"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
    ]


def port_labels(pod: KubeObject, container: dict[str, Any], port: dict[str, Any]) -> dict[str, str]:
    metadata = pod["metadata"]
    labels = {
        f"{META}_namespace": metadata["namespace"],
        f"{META}_pod_name": metadata["name"],
        f"{META}_pod_uid": metadata["uid"],
        f"{META}_pod_ip": pod["status"]["podIP"],
        f"{META}_pod_phase": pod["status"]["phase"],
        f"{META}_pod_node_name": pod["spec"].get("nodeName", ""),
        f"{META}_pod_container_name": container["name"],
        f"{META}_pod_container_port_name": port.get("name", ""),
        f"{META}_pod_container_port_number": str(port["containerPort"]),
    }
    for name, value in metadata.get("labels", {}).items():
        labels |= {label(name): value, label(name, "labelpresent"): "true"}
    return labels


def label(name: str, kind: str = "label") -> str:
    """How Prometheus spells a pod's label or annotation."""
    return f"{META}_pod_{kind}_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
