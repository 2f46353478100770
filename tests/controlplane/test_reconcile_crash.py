"""An operator that ends after any of its writes: the next one brings the service to the same state."""

from typing import Any

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import controllers_caught_up, manifest, portrait, run_pass

# Without pods, whose controllers would take most of the time. The update changes a Deployment and drops a child.
IDLE = {"replicas": 0, "router": {"replicas": 0}}
UPDATE = {**IDLE, "engine": {"device": "cpu", "maxNumSeqs": 8}, "pod": {"serviceAccountName": "mine"}}


def apply(control_plane: ControlPlane, namespace: str, name: str, **spec: Any) -> None:
    control_plane.apply(manifest(namespace, name, **spec))


def tear_and_mend(control_plane: ControlPlane, namespace: str, name: str, number: int) -> None:
    """A pass that ends after `number` writes, then a whole one."""
    torn = run_pass(control_plane, namespace, name, crash_after=number)
    assert (len(torn.writes), torn.outcome) == (number, None)
    run_pass(control_plane, namespace, name)


def final_portraits(control_plane: ControlPlane, namespace: str, names: list[str]) -> dict[str, str]:
    """Each service as it is once the controllers are done and a last pass has seen it."""
    wait_until(lambda: controllers_caught_up(control_plane, namespace), 30, "the Deployments' controller")
    for name in names:
        run_pass(control_plane, namespace, name)
    return {name: portrait(control_plane, namespace, name) for name in names}


def test_a_crash_after_any_write_of_a_creation_changes_nothing_in_the_end(
    control_plane: ControlPlane, namespace: str
) -> None:
    apply(control_plane, namespace, "whole", router={"replicas": 1})
    num_writes = len(run_pass(control_plane, namespace, "whole").writes)
    names = [f"torn{number:02d}" for number in range(1, num_writes + 1)]
    for number, name in enumerate(names, start=1):
        apply(control_plane, namespace, name, router={"replicas": 1})
        tear_and_mend(control_plane, namespace, name, number)
    portraits = final_portraits(control_plane, namespace, ["whole", *names])
    assert portraits == dict.fromkeys(portraits, portraits["whole"])
    assert run_pass(control_plane, namespace, names[-1]).writes == []


def test_a_crash_after_any_write_of_an_update_changes_nothing_in_the_end(
    control_plane: ControlPlane, namespace: str
) -> None:
    apply(control_plane, namespace, "whole", **IDLE)
    run_pass(control_plane, namespace, "whole")
    apply(control_plane, namespace, "whole", **UPDATE)
    writes = run_pass(control_plane, namespace, "whole").writes
    assert ("delete", "ServiceAccount") in writes
    names = [f"torn{number:02d}" for number in range(1, len(writes) + 1)]
    for number, name in enumerate(names, start=1):
        apply(control_plane, namespace, name, **IDLE)
        run_pass(control_plane, namespace, name)
        apply(control_plane, namespace, name, **UPDATE)
        tear_and_mend(control_plane, namespace, name, number)
    portraits = final_portraits(control_plane, namespace, ["whole", *names])
    assert portraits == dict.fromkeys(portraits, portraits["whole"])
    assert run_pass(control_plane, namespace, names[-1]).writes == []
