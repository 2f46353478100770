"""`kubectl kvasir status` as its users run it, against a real API server."""

import os
import subprocess
from pathlib import Path

from .control_plane import ControlPlane
from .processes import wait_until
from .programs import program_directory
from .reconciling import NAME, current_revision, manifest, mark_engines_ready, settle
from .rights import account, account_kubeconfig, grant

VIEWER = "viewer"
SERVICES = {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices"], "verbs": ["get", "list", "watch"]}


def test_one_screen_tells_all_of_a_service(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace))
    assert "no operator has reported yet" in status(control_plane.kubeconfig, NAME, "--namespace", namespace).stdout
    settle(control_plane, namespace)
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    done = status(control_plane.kubeconfig, NAME, "--namespace", namespace)
    shown, revision = words(done.stdout), current_revision(control_plane, namespace)
    assert done.returncode == 0
    assert f"{namespace}/{NAME} is Scaling: 2/2 ready" in shown, "the fake node has no router ready"
    assert "serve 2 2 0" in shown
    assert any(line.startswith("ModelLoaded True ") and " ModelLoaded: " in line for line in shown)
    assert any(line.endswith(f"serve {revision}") for line in shown)
    assert any(" Created " in line for line in shown)


def test_what_is_wrong_is_said(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    usage = status(control_plane.kubeconfig)
    assert (usage.returncode, usage.stderr.split(" [")[0]) == (2, "usage: kubectl kvasir status NAME")
    nobody = status(control_plane.kubeconfig, "nobody", "--namespace", namespace)
    assert (nobody.returncode, 'inferenceservices.serving.kvasir.dev "nobody" not found' in nobody.stderr) == (1, True)
    control_plane.apply(manifest(namespace))
    viewer = account_kubeconfig(control_plane, namespace, tmp_path, VIEWER)
    assert 'cannot get resource "inferenceservices"' in status(viewer, NAME, "--namespace", namespace).stderr
    grant(control_plane, namespace, account(namespace, VIEWER), [SERVICES])

    def shown_with_what_is_not() -> bool:
        done = status(viewer, NAME, "--namespace", namespace)
        refused = [f'cannot list resource "{each}"' in done.stderr for each in ("deployments", "events")]
        return done.returncode == 1 and all(refused) and "no operator has reported yet" in done.stdout

    wait_until(shown_with_what_is_not, 10, "the right to be known")


def status(kubeconfig: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kubectl kvasir status ARGUMENTS`."""
    path = f"{program_directory()}:{Path(__file__).parents[2] / 'operator'}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "PATH": path}
    command = ["kubectl", "kvasir", "status", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def words(text: str) -> list[str]:
    """Its lines, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]
