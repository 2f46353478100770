"""Verdict by traffic and status: a service holds an accelerator, and a GPU that cannot be used is an error."""

from pathlib import Path

from e2e.conftest import Deploy, StartLoad
from e2e.live_cluster import KubeObject, LiveCluster
from e2e.traffic.answers import answers
from e2e.verdicts import Verdicts

MANIFEST = Path(__file__).parent / "service.yaml"
FAKE, NVIDIA = "example.com/fake", "nvidia.com/gpu"
CRASHES = ("ContainerFailed", "CrashLooping")
TELLS_WITHIN_SECONDS = 60.0
"""The engine's start is part of it: torch is loaded before it looks for a GPU."""


def test_a_service_holds_its_accelerators_and_serves(
    live_cluster: LiveCluster, deploy: Deploy, start_load: StartLoad, rig: None, verdicts: Verdicts
) -> None:
    service = deploy(MANIFEST)
    service.wait_ready()
    [pod] = service.pods("serve")
    assert amounts(pod, FAKE) == {"requests": "1", "limits": "1"}
    assert device_of(pod) == "auto"
    node = pod["spec"]["nodeName"]
    assert FAKE in allocated(live_cluster.kubectl("describe", "node", node))
    with start_load(service, answers(200), num_clients=3) as load:
        load.wait_streams(6)
        verdict = load.stop()
    verdicts.add("a service with an accelerator", verdict)
    assert not verdict.failures, verdict


def test_a_gpu_that_cannot_be_used_is_an_error_and_no_run_on_the_cpu(
    deploy: Deploy, rig: None, verdicts: Verdicts
) -> None:
    service = deploy(MANIFEST, resources={"accelerator": NVIDIA, "cpu": "1", "memory": "2Gi"})
    ready = service.wait_condition("Ready", names_missing_gpu, TELLS_WITHIN_SECONDS)
    assert ready["status"] == "False"
    assert {(device_of(pod), amounts(pod, NVIDIA)["limits"]) for pod in service.pods("serve")} == {("cuda", "1")}


def names_missing_gpu(condition: KubeObject) -> KubeObject | None:
    says_so = condition.get("reason") in CRASHES and "no CUDA device is visible" in condition["message"]
    return condition if says_so else None


def amounts(pod: KubeObject, resource: str) -> dict[str, str]:
    [container] = pod["spec"]["containers"]
    return {kind: container["resources"][kind][resource] for kind in ("requests", "limits")}


def device_of(pod: KubeObject) -> str:
    command: list[str] = pod["spec"]["containers"][0]["command"]
    return command[command.index("--device") + 1]


def allocated(described: str) -> list[str]:
    """The resources of which `kubectl describe node` shows some as requested."""
    rows = [line.split() for line in described.partition("Allocated resources:")[2].splitlines()]
    return [row[0] for row in rows if len(row) >= 3 and row[1] == "1"]
