"""A kind whose CRD is installed, and removed again, while the operator runs."""

from pathlib import Path
from typing import Any

from kubernetes.dynamic.exceptions import TooManyRequestsError

from kvasir_operator.kube.kinds import POD_MONITOR

from .control_plane import ControlPlane
from .operator_process import forked_operator
from .processes import wait_until
from .reconciling import manifest, path_of

# As the Prometheus operator's, but for the schema.
POD_MONITOR_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{POD_MONITOR.plural}.{POD_MONITOR.group}"},
    "spec": {
        "group": POD_MONITOR.group,
        "scope": "Namespaced",
        "names": {"plural": POD_MONITOR.plural, "singular": "podmonitor", "kind": POD_MONITOR.kind},
        "versions": [
            {
                "name": POD_MONITOR.version,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def pod_monitors(control_plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    """None are there yet while the API server asks to be left alone, as it does at first."""
    try:
        found: list[dict[str, Any]] = control_plane.request("get", path_of(POD_MONITOR, namespace))["items"]
    except TooManyRequestsError:
        return []
    return found


def test_a_crd_that_is_installed_while_the_operator_runs_is_used_and_may_go_again(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = (f"--namespace={namespace}", "--resync-seconds=2")
    with forked_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        control_plane.apply(manifest(namespace))
        operator.wait_until_ready()  # without the CRD
        control_plane.install_crd(POD_MONITOR_CRD)
        try:
            assert operator.word_after("the cluster serves ") == POD_MONITOR.kind
            wait_until(lambda: pod_monitors(control_plane, namespace), 30, "the service's PodMonitors")
            name = pod_monitors(control_plane, namespace)[0]["metadata"]["name"]
            control_plane.request("delete", path_of(POD_MONITOR, namespace, name))
            wait_until(lambda: control_plane.exists(path_of(POD_MONITOR, namespace, name)), 30, "it to be put back")
        finally:
            control_plane.remove_crd(POD_MONITOR_CRD["metadata"]["name"])
        assert operator.word_after("the cluster no longer serves ") == POD_MONITOR.kind
        operator.wait_until_ready()
