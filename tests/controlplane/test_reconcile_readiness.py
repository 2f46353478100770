"""What passes on a real API server say of a service that is partly staffed, at zero, suspended or blocked."""

from typing import Any

from .control_plane import ControlPlane
from .reconciling import NAME, conditions, get_service, manifest, settle

ENGINES = f"serving.kvasir.dev/service={NAME},serving.kvasir.dev/role=serve"
ROUTERS = f"serving.kvasir.dev/service={NAME},serving.kvasir.dev/role=router"


def settled(control_plane: ControlPlane, namespace: str, **spec: Any) -> dict[str, Any]:
    control_plane.apply(manifest(namespace, **spec))
    settle(control_plane, namespace)
    status: dict[str, Any] = get_service(control_plane, namespace)["status"]
    return status


def test_a_service_at_zero_waits_for_its_router_and_then_for_somebody_to_scale_it(
    control_plane: ControlPlane, namespace: str
) -> None:
    waiting = settled(control_plane, namespace, replicas=0)
    assert conditions({"status": waiting})["Ready"] == ("False", "WaitingForPods")
    control_plane.mark_pods_ready(namespace, ROUTERS, 2)
    status = settled(control_plane, namespace, replicas=0)
    assert (status["phase"], status["ready"]) == ("Idle", "0/0")
    assert conditions({"status": status})["Ready"] == ("False", "Idle")


def test_a_service_is_ready_by_its_first_engine_and_progresses_to_all(
    control_plane: ControlPlane, namespace: str
) -> None:
    settled(control_plane, namespace, replicas=1)
    control_plane.mark_pods_ready(namespace, ROUTERS, 2)
    control_plane.mark_pods_ready(namespace, ENGINES, 1)
    status = settled(control_plane, namespace, replicas=3)
    assert status["ready"] == "1/3"
    seen = conditions({"status": status})
    assert (seen["Ready"], seen["Progressing"]) == (("True", "Serving"), ("True", "Scaling"))


def test_a_suspended_service_keeps_no_pods_and_says_so(control_plane: ControlPlane, namespace: str) -> None:
    settled(control_plane, namespace, replicas=1)
    status = settled(control_plane, namespace, replicas=1, suspend=True)
    assert status["phase"] == "Suspended"
    assert conditions({"status": status})["Ready"] == ("False", "Suspended")
    assert [entry["desired"] for entry in status["roles"]] == [0, 0]


def test_a_feature_that_blocks_engines_is_why_a_service_is_not_ready(
    control_plane: ControlPlane, namespace: str
) -> None:
    status = settled(control_plane, namespace, replicas=1, engine={"quantization": "int8"})
    assert conditions({"status": status})["Ready"] == ("False", "UnsupportedFeature")
    assert (status["phase"], status["ready"], status["replicas"]) == ("Degraded", "0/1", 0)


def test_what_blocks_engines_of_a_service_at_zero_is_said_before_a_request_would_wake_it(
    control_plane: ControlPlane, namespace: str
) -> None:
    settled(control_plane, namespace, replicas=1)
    control_plane.mark_pods_ready(namespace, ROUTERS, 2)
    assert conditions({"status": settled(control_plane, namespace, replicas=0)})["Ready"] == ("False", "Idle")
    for replicas in (0, 1):  # asleep, and woken: the revision before has no Service any more
        status = settled(control_plane, namespace, replicas=replicas, engine={"quantization": "int8"})
        assert conditions({"status": status})["Ready"] == ("False", "UnsupportedFeature")
        assert status["replicas"] == 0
