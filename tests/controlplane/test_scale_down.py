"""A service shrinks on a real API server: Kubernetes' own controllers remove the pods that the operator chose."""

from collections.abc import Iterable
from functools import partial

from kvasir_operator.api.labels import role_selector, selector_text
from kvasir_operator.kube.kinds import KubeObject

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import NAME, get_service, manifest, run_pass, settle

ENGINES = selector_text(role_selector(NAME, "serve"))


def names(pods: Iterable[KubeObject]) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in pods)


def engines(control_plane: ControlPlane, namespace: str) -> list[str]:
    return names(control_plane.wait_for_pods(namespace, ENGINES))


def start_engines(control_plane: ControlPlane, namespace: str, replicas: int) -> list[str]:
    """Their names; the first is the busiest for `first_is_busy`."""
    control_plane.apply(manifest(namespace, replicas=replicas))
    settle(control_plane, namespace)
    ready = names(control_plane.mark_pods_ready(namespace, ENGINES, replicas))
    settle(control_plane, namespace)
    return ready


async def first_is_busy(pods: Iterable[KubeObject]) -> dict[str, int]:
    return {name: -rank for rank, name in enumerate(names(pods))}


def test_the_busiest_engine_stays(control_plane: ControlPlane, namespace: str) -> None:
    ready = start_engines(control_plane, namespace, 4)
    control_plane.apply(manifest(namespace, replicas=1))
    writes = run_pass(control_plane, namespace, read_work=first_is_busy).writes
    assert writes.count(("patch", "Pod")) == 3
    wait_until(lambda: len(engines(control_plane, namespace)) == 1, 30, "three engines to go")
    assert engines(control_plane, namespace) == ready[:1]


def test_kubectl_scale_shrinks_in_the_same_way(control_plane: ControlPlane, namespace: str) -> None:
    ready = start_engines(control_plane, namespace, 3)
    path = f"/apis/serving.kvasir.dev/v1alpha1/namespaces/{namespace}/inferenceservices/{NAME}/scale"
    scale = control_plane.request("get", path)
    control_plane.request("put", path, {**scale, "spec": {"replicas": 2}})
    run_pass(control_plane, namespace, read_work=first_is_busy)
    wait_until(lambda: len(engines(control_plane, namespace)) == 2, 30, "one engine to go")
    assert engines(control_plane, namespace) == ready[:2]


def has_engines(control_plane: ControlPlane, namespace: str, number: int) -> bool:
    return len(engines(control_plane, namespace)) == number


def test_replicas_that_an_autoscaler_of_somebody_elses_sets_are_left_to_it(
    control_plane: ControlPlane, namespace: str
) -> None:
    """As an HPA does, through /scale by a field manager of its own; a resync is a pass like others."""
    given = manifest(namespace)
    del given["spec"]["replicas"]
    control_plane.apply(given)
    settle(control_plane, namespace)
    path = f"/apis/serving.kvasir.dev/v1alpha1/namespaces/{namespace}/inferenceservices/{NAME}/scale"
    for replicas in (3, 1):
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": NAME, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        control_plane.request("put", path, scale, fieldManager="hpa")
        settle(control_plane, namespace)
        assert run_pass(control_plane, namespace).writes == []
        wait_until(partial(has_engines, control_plane, namespace, replicas), 30, f"{replicas} engines")
        assert get_service(control_plane, namespace)["spec"]["replicas"] == replicas


def test_engines_that_tell_nothing_are_still_removed(control_plane: ControlPlane, namespace: str) -> None:
    start_engines(control_plane, namespace, 2)
    control_plane.apply(manifest(namespace, replicas=1))
    assert ("patch", "Pod") not in run_pass(control_plane, namespace).writes
    wait_until(lambda: len(engines(control_plane, namespace)) == 1, 30, "one engine to go")


def test_a_pass_after_the_shrink_writes_nothing_to_pods(control_plane: ControlPlane, namespace: str) -> None:
    start_engines(control_plane, namespace, 2)
    control_plane.apply(manifest(namespace, replicas=1))
    run_pass(control_plane, namespace, read_work=first_is_busy)
    wait_until(lambda: len(engines(control_plane, namespace)) == 1, 30, "one engine to go")
    settle(control_plane, namespace)
    assert run_pass(control_plane, namespace, read_work=first_is_busy).writes == []
