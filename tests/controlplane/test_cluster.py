"""The control plane that the other tests stand on: it is real, its controllers work, and it leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import Configuration, CoreV1Api, V1ConfigMap, V1ObjectMeta
from kubernetes.config import load_kube_config
from tests.controlplane.control_plane import ControlPlane, Write, api_client
from tests.controlplane.processes import ControlPlaneError, ServerProcess, wait_until
from tests.controlplane.programs import BUILD

FAKE_GO = """#!/bin/sh
echo called >> "$CALLS"
while [ $# -gt 1 ] && [ "$1" != -o ]; do shift; done
sleep 0.3
printf '#!/bin/sh\\necho etcd kube-apiserver kube-controller-manager\\n' > "$2"
chmod +x "$2"
"""


def deployment(namespace: str, replicas: int = 2) -> dict[str, Any]:
    labels = {"app": "echo"}
    container = {"name": "echo", "image": "echo:1", "ports": [{"containerPort": 8000}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "echo", "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def service(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "echo", "namespace": namespace},
        "spec": {"selector": {"app": "echo"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }


def ready_addresses(control_plane: ControlPlane, namespace: str) -> set[str]:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    slices = control_plane.request("get", path)["items"]
    endpoints = [endpoint for each in slices for endpoint in each["endpoints"] or []]
    return {endpoint["addresses"][0] for endpoint in endpoints if endpoint["conditions"]["ready"]}


def test_the_server_knows_its_release(control_plane: ControlPlane) -> None:
    version = control_plane.request("get", "/version")["gitVersion"]
    assert version.startswith("v1.")
    assert "master" not in version


def test_a_deployment_becomes_pods_that_wait_for_a_node(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(deployment(namespace, replicas=2))
    pods = control_plane.wait_for_pods(namespace, "app=echo", num_pods=2)
    assert [pod["status"]["phase"] for pod in pods] == ["Pending", "Pending"]


def test_pods_marked_ready_become_endpoints_and_available_replicas(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(deployment(namespace, replicas=2))
    control_plane.apply(service(namespace))
    pods = control_plane.mark_pods_ready(namespace, "app=echo", num_pods=2)
    addresses = {pod["status"]["podIP"] for pod in pods}
    wait_until(lambda: ready_addresses(control_plane, namespace) == addresses, 20, f"endpoints {addresses}")
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/echo"
    wait_until(lambda: control_plane.request("get", path)["status"].get("availableReplicas") == 2, 20, "availability")


def test_pods_marked_waiting_say_why(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(deployment(namespace, replicas=1))
    [pod] = control_plane.mark_pods_waiting(namespace, "app=echo", "ImagePullBackOff", "no such image echo:1")
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"


def test_deleting_an_owner_removes_its_children(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(deployment(namespace))
    control_plane.mark_pods_ready(namespace, "app=echo", num_pods=2)
    control_plane.request("delete", f"/apis/apps/v1/namespaces/{namespace}/deployments/echo")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    wait_until(lambda: not control_plane.request("get", pods)["items"], 20, "the garbage collector to remove the pods")


def test_a_bound_pod_terminates_only_when_its_node_says_so(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(deployment(namespace, replicas=1))
    [pod] = control_plane.mark_pods_ready(namespace, "app=echo", node="slow-node")
    path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
    control_plane.request("delete", path)
    assert "deletionTimestamp" in control_plane.request("get", path)["metadata"]
    control_plane.end_terminating_pods(namespace)
    assert not control_plane.exists(path)


def test_writes_are_told_apart_by_user(control_plane: ControlPlane, namespace: str) -> None:
    notes = V1ConfigMap(metadata=V1ObjectMeta(name="notes"))
    configuration = Configuration()
    load_kube_config(str(control_plane.operator_kubeconfig), client_configuration=configuration)
    with api_client(configuration) as operator:
        CoreV1Api(operator).create_namespaced_config_map(namespace, notes)
    assert control_plane.writes("operator", namespace) == [Write("create", "configmaps", namespace, "notes", 201)]
    assert Write("create", "configmaps", namespace, "notes", 201) not in control_plane.writes("admin", namespace)


def test_a_program_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    process = ServerProcess(["/bin/sh", "-c", "echo no room left; exit 3"], tmp_path / "log")
    with pytest.raises(ControlPlaneError, match=r"sh ended with status 3, .*\nno room left"):
        process.wait_until(lambda: None, 10, "a miracle")


def test_servers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from tests.controlplane.processes import ServerProcess; "
    code += "print(ServerProcess(['/bin/sleep', '60'], Path(sys.argv[1])).pid, flush=True); os.kill(os.getpid(), 9)"
    root = Path(__file__).parents[2]
    starter = subprocess.run([sys.executable, "-c", code, tmp_path / "log"], cwd=root, capture_output=True, text=True)
    wait_until(lambda: has_ended(int(starter.stdout)), 10, "the orphan to be killed")


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def run_build(**environment: str) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("KUBEBUILDER_ASSETS", "XDG_CACHE_HOME")
    }
    return subprocess.Popen(
        [sys.executable, BUILD], env=inherited | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def fake_go(directory: Path) -> dict[str, str]:
    """The environment in which `go build` is a script that counts its calls in `directory`/calls."""
    (directory / "bin").mkdir()
    (directory / "bin" / "go").write_text(FAKE_GO)
    (directory / "bin" / "go").chmod(0o755)
    path = f"{directory / 'bin'}:/usr/bin:/bin"
    return {"PATH": path, "XDG_CACHE_HOME": str(directory / "cache"), "CALLS": str(directory / "calls")}


def test_builds_started_at_once_build_once(tmp_path: Path) -> None:
    environment = fake_go(tmp_path)
    builds = [run_build(**environment) for _ in range(3)]
    directories = {build.communicate(timeout=60)[0].splitlines()[-1] for build in builds}
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    programs = {path.name for path in Path(directories.pop()).iterdir()}
    assert programs == {"etcd", "kube-apiserver", "kube-controller-manager"}
    assert not directories


def test_a_build_that_fails_leaves_no_programs_and_shows_why(tmp_path: Path) -> None:
    environment = fake_go(tmp_path)
    (tmp_path / "bin" / "go").write_text("#!/bin/sh\necho main.go:9: no such thing\nexit 1\n")
    build = run_build(**environment)
    errors = build.communicate(timeout=60)[1]
    assert build.returncode == 1
    assert "main.go:9: no such thing" in errors
    assert [path.suffix for path in (tmp_path / "cache" / "kvasir").iterdir()] == [".lock"]


def test_a_build_without_go_says_what_to_install(tmp_path: Path) -> None:
    errors = run_build(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path)).communicate(timeout=60)[1]
    assert "install Go 1.26 or newer, or set KUBEBUILDER_ASSETS" in errors


def test_given_programs_are_used_as_they_are(tmp_path: Path) -> None:
    for name in ("etcd", "helm", "kube-apiserver", "kube-controller-manager", "kubectl"):
        (tmp_path / name).touch(mode=0o755)
    output = run_build(KUBEBUILDER_ASSETS=str(tmp_path)).communicate(timeout=60)[0]
    assert output == f"{tmp_path}\n"


def test_given_programs_must_be_complete(tmp_path: Path) -> None:
    (tmp_path / "etcd").touch(mode=0o755)
    errors = run_build(KUBEBUILDER_ASSETS=str(tmp_path)).communicate(timeout=60)[1]
    assert "has no executable helm, kube-apiserver, kube-controller-manager, kubectl:" in errors
