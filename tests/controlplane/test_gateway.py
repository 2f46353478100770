"""Services behind the gateway over a real API server: what a running operator hears of it, and of who has a name."""

from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvasir_operator.kube.kinds import INFERENCE_SERVICE, SECRET
from kvasir_operator.resources.router_secret import derived_secret

from .control_plane import ControlPlane
from .operator_process import forked_operator
from .processes import wait_until
from .reconciling import conditions, get_children, get_service, manifest, path_of

GATEWAY = "kvasir-gateway"
PODS = f"app={GATEWAY}"
GATEWAY_SECRET = "a-secret-of-the-gateways-own"
MOVED = "moved"
SECONDS = 30.0
SERVED, REFUSED, AWAY = ("False", "Idle"), ("False", "ModelNameTaken"), ("False", "GatewayNotReady")


@pytest.fixture(scope="module")
def behind(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The namespace that an operator serves, of an installation whose gateway has a ready pod there."""
    namespace, directory = "behind-gateway", tmp_path_factory.mktemp("gateway")
    control_plane.create_namespace(namespace)
    make_gateway(control_plane, namespace)
    control_plane.mark_pods_ready(namespace, PODS, 1)
    defaults = {"gateway": {"namespace": namespace, "name": GATEWAY, "podLabels": {"app": GATEWAY}}}
    (directory / "defaults.yaml").write_text(yaml.safe_dump(defaults))
    flags = (f"--namespace={namespace}", f"--pod-defaults={directory / 'defaults.yaml'}", "--resync-seconds=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVASIR_GATEWAY_SECRET", GATEWAY_SECRET)
        with forked_operator(control_plane.operator_kubeconfig, directory / "log", *flags):
            yield namespace
    control_plane.delete_namespace(namespace)


def make_gateway(control_plane: ControlPlane, namespace: str) -> None:
    labels = {"app": GATEWAY}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "gateway", "image": "gateway"}]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": pod}
    metadata = {"name": GATEWAY, "namespace": namespace}
    control_plane.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})


def behind_gateway(namespace: str, name: str, model: str) -> dict[str, Any]:
    """At zero: no engine is asked for."""
    source = {"source": "pvc://checkpoints/model", "name": model}
    return manifest(namespace, name, model=source, router={"mode": "gateway"}, replicas=0)


def wait_ready_is(control_plane: ControlPlane, namespace: str, name: str, expected: tuple[str, str]) -> None:
    def is_so() -> bool:
        service = get_service(control_plane, namespace, name)
        return "status" in service and conditions(service)["Ready"] == expected

    wait_until(is_so, SECONDS, f"condition Ready of {name} to be {expected}")


def test_a_name_goes_to_the_next_service_when_its_owner_is_renamed_or_deleted(
    control_plane: ControlPlane, behind: str
) -> None:
    for name in ("a-first", "b-second", "c-third"):  # of one second, the first by its name
        control_plane.apply(behind_gateway(behind, name, "big"))
    wait_ready_is(control_plane, behind, "a-first", SERVED)
    wait_ready_is(control_plane, behind, "b-second", REFUSED)
    degraded = next(
        each
        for each in get_service(control_plane, behind, "b-second")["status"]["conditions"]
        if each["type"] == "Degraded"
    )
    assert f"'big' belongs to service {behind}/a-first" in degraded["message"]
    control_plane.apply(behind_gateway(behind, "a-first", "other"))
    wait_ready_is(control_plane, behind, "b-second", SERVED)
    wait_ready_is(control_plane, behind, "c-third", REFUSED)
    control_plane.request("delete", path_of(INFERENCE_SERVICE, behind, "b-second"))
    wait_ready_is(control_plane, behind, "c-third", SERVED)


def test_services_are_ready_as_long_as_the_gateway_is(control_plane: ControlPlane, behind: str) -> None:
    control_plane.apply(behind_gateway(behind, "llama", "own"))
    wait_ready_is(control_plane, behind, "llama", SERVED)
    control_plane.mark_pods_waiting(behind, PODS, "CrashLoopBackOff", "", 1)
    wait_ready_is(control_plane, behind, "llama", AWAY)
    control_plane.mark_pods_ready(behind, PODS, 1)
    wait_ready_is(control_plane, behind, "llama", SERVED)


def test_a_service_that_goes_behind_the_gateway_loses_its_router_and_gets_the_gateways_secret(
    control_plane: ControlPlane, behind: str
) -> None:
    control_plane.apply(manifest(behind, MOVED, replicas=0))
    wait_until(lambda: kinds_of_router(control_plane, behind), SECONDS, "a router of the service's own")
    control_plane.apply(behind_gateway(behind, MOVED, "moved"))
    wait_until(lambda: not kinds_of_router(control_plane, behind), SECONDS, "the router to be gone")
    wait_ready_is(control_plane, behind, MOVED, SERVED)
    status = get_service(control_plane, behind, MOVED)["status"]
    assert status["url"] == f"http://{GATEWAY}.{behind}.svc:8080/v1"
    values = {b64decode(value).decode() for value in secrets(control_plane, behind)}
    assert derived_secret(GATEWAY_SECRET, behind, MOVED) in values


def kinds_of_router(control_plane: ControlPlane, namespace: str) -> set[str]:
    """But for its Secret, which stays for a way back."""
    keys = get_children(control_plane, namespace, MOVED)
    return {key.kind.kind for key in keys if key.name == f"{MOVED}-router" and key.kind != SECRET}


def secrets(control_plane: ControlPlane, namespace: str) -> set[str]:
    children = get_children(control_plane, namespace, MOVED)
    return {value for key, child in children.items() if key.kind == SECRET for value in child["data"].values()}
