"""`kvasir-operator status` as its users run it, against a real API server."""

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvasir_operator.cli import main
from kvasir_operator.kube.kinds import INFERENCE_SERVICE

from .control_plane import ControlPlane
from .operator_process import PROGRAM
from .processes import die_with_parent, wait_until
from .programs import program_directory
from .reconciling import (
    NAME,
    current_revision,
    manifest,
    mark_engines_ready,
    path_of,
    run_pass,
    settle,
)
from .rights import account, account_kubeconfig, grant

VIEWER = "viewer"
SERVICES = {"apiGroups": ["serving.kvasir.dev"], "resources": ["inferenceservices"], "verbs": ["get", "list", "watch"]}
LEAVE_SCREEN = b"\x1b[?1049l"


def words(text: str) -> list[str]:
    """Its lines, with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_one_screen_tells_all_of_a_service(
    control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control_plane.apply(manifest(namespace))
    settle(control_plane, namespace)
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    assert main(["status", f"{namespace}/{NAME}", "--kubeconfig", str(control_plane.kubeconfig)]) == 0
    shown = words(capsys.readouterr().out)
    revision = current_revision(control_plane, namespace)
    assert f"service {namespace}/{NAME}" in shown
    assert f"serve 2 2 0 {revision}" in shown
    assert f"serve {revision} 1 2 2 0" in shown
    assert any(line.startswith("ModelLoaded True ModelLoaded ") for line in shown)
    assert any(" Created created " in line for line in shown)


def test_the_plug_in_of_kubectl_tells_as_much(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.apply(manifest(namespace))
    assert "no operator has reported yet" in plug_in(control_plane, NAME, "--namespace", namespace).stdout
    settle(control_plane, namespace)
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    shown = words(plug_in(control_plane, NAME, "--namespace", namespace).stdout)
    revision = current_revision(control_plane, namespace)
    assert f"{namespace}/{NAME} is Scaling: 2/2 ready" in shown, "the fake node has no router ready"
    assert "serve 2 2 0" in shown
    assert any(line.startswith("ModelLoaded True ") and " ModelLoaded: " in line for line in shown)
    assert any(line.endswith(f"serve {revision}") for line in shown)
    assert any(" Created " in line for line in shown)
    assert plug_in(control_plane).stderr.startswith("usage: kubectl kvasir status NAME")
    assert plug_in(control_plane, "nobody", "--namespace", namespace).returncode != 0


def plug_in(control_plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`kubectl kvasir status ARGUMENTS`."""
    path = f"{program_directory()}:{Path(__file__).parents[2] / 'operator'}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(control_plane.kubeconfig), "PATH": path}
    command = ["kubectl", "kvasir", "status", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_what_somebody_may_not_see_is_said(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control_plane.apply(manifest(namespace))
    kubeconfig = account_kubeconfig(control_plane, namespace, tmp_path, VIEWER)
    command = ["status", f"{namespace}/{NAME}", "--kubeconfig", str(kubeconfig)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert 'cannot get resource "inferenceservices"' in error
    assert f"ask for the ClusterRole view in namespace {namespace}" in error
    grant(control_plane, namespace, account(namespace, VIEWER), [SERVICES])
    wait_until(lambda: main(command) == 0, 10, "the right to be known")
    notes = [line for line in words(capsys.readouterr().out) if line.startswith("note ")]
    assert [note.split(" are ")[0] for note in notes] == ["note revisions", "note Events"]


def test_a_watched_service_is_shown_again_when_it_changes_until_it_is_deleted(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    control_plane.apply(manifest(namespace))
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        watching = subprocess.Popen(
            command(control_plane, namespace), stdout=out, stderr=err, preexec_fn=die_with_parent
        )

    def shows(text: str) -> bool:
        return text in (tmp_path / "out").read_text()

    wait_until(lambda: shows("no operator has reported yet"), 30, "the service without a status")
    run_pass(control_plane, namespace)
    wait_until(lambda: shows("WaitingForPods"), 30, "the status of the first pass")
    control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
    assert watching.wait(30) == 1
    assert f"there is no InferenceService '{NAME}' in namespace '{namespace}'" in (tmp_path / "err").read_text()


def test_on_a_terminal_it_is_drawn_on_a_screen_of_its_own_which_an_interrupt_ends(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace))
    with in_terminal(command(control_plane, namespace)) as (process, terminal):
        shown = b""
        while b"no operator has reported" not in shown:
            shown += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        while LEAVE_SCREEN not in shown:
            shown += os.read(terminal, 4096)
        assert process.wait(10) == 0


def command(control_plane: ControlPlane, namespace: str) -> list[str]:
    return [str(PROGRAM), "status", f"{namespace}/{NAME}", "--watch", f"--kubeconfig={control_plane.kubeconfig}"]


def heed_interrupts() -> None:
    """Also where whoever runs the tests ignores them, as a shell's background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


@contextmanager
def in_terminal(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process whose output is a terminal of 100 columns, and that terminal's other end."""
    terminal, output = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, preexec_fn=heed_interrupts)
    os.close(output)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
