"""Rollouts on a real API server, whose own controllers make and remove the pods."""

from typing import Any

import pytest
from tests.operator.api.test_quantity import CANONICAL

from kvasir_operator.api.labels import REVISION_LABEL, TRAFFIC_WEIGHT
from kvasir_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVICE, SECRET, SERVICE, Kind, KubeObject
from kvasir_operator.observe.waiting import is_ready

from .control_plane import ControlPlane
from .fake_node import MERGE_PATCH
from .processes import wait_until
from .reconciling import (
    NAME,
    conditions,
    current_engine,
    current_revision,
    engine_pods,
    get_children,
    get_events,
    get_service,
    manifest,
    mark_engines_ready,
    path_of,
    roll_out,
    run_pass,
    settle,
)

NEW = {"device": "cpu", "maxNumSeqs": 8}


def deploy(control_plane: ControlPlane, namespace: str, **spec: Any) -> str:
    """The name of its current revision's objects."""
    control_plane.apply(manifest(namespace, **spec))
    settle(control_plane, namespace)
    return current_engine(control_plane, namespace)


def serve(control_plane: ControlPlane, namespace: str, **spec: Any) -> str:
    """As deploy, with all engines ready."""
    name = deploy(control_plane, namespace, **spec)
    roll_out(control_plane, namespace)
    return name


def engines(control_plane: ControlPlane, namespace: str, kind: Kind = DEPLOYMENT) -> dict[str, KubeObject]:
    """Objects of engine revisions by name."""
    children = get_children(control_plane, namespace)
    return {
        key.name: child
        for key, child in children.items()
        if key.kind == kind and REVISION_LABEL in child["metadata"]["labels"]
    }


def replicas(control_plane: ControlPlane, namespace: str) -> dict[str, int]:
    return {name: each["spec"]["replicas"] for name, each in engines(control_plane, namespace).items()}


def num_ready(control_plane: ControlPlane, namespace: str) -> int:
    return sum(map(is_ready, engine_pods(control_plane, namespace)))


def test_a_new_spec_rolls_the_pods_one_by_one(control_plane: ControlPlane, namespace: str) -> None:
    old = serve(control_plane, namespace)
    new = deploy(control_plane, namespace, engine=NEW)
    assert replicas(control_plane, namespace) == {old: 2, new: 1}
    assert get_service(control_plane, namespace)["status"]["phase"] == "Updating"

    def is_done() -> bool:
        mark_engines_ready(control_plane, namespace)
        assert num_ready(control_plane, namespace) >= 2
        run_pass(control_plane, namespace)
        assert sum(replicas(control_plane, namespace).values()) <= 3
        return replicas(control_plane, namespace) == {old: 0, new: 2}

    wait_until(is_done, 60, "the rollout to end")
    settle(control_plane, namespace)
    assert set(engines(control_plane, namespace, SERVICE)) == {new}
    assert "RevisionRolled" in [reason for reason, _ in get_events(control_plane, namespace)]
    assert run_pass(control_plane, namespace).writes == []


def test_a_rollback_brings_the_same_workload_back(control_plane: ControlPlane, namespace: str) -> None:
    old = serve(control_plane, namespace)
    uid = engines(control_plane, namespace)[old]["metadata"]["uid"]
    new = serve(control_plane, namespace, engine=NEW)
    assert replicas(control_plane, namespace) == {old: 0, new: 2}
    assert serve(control_plane, namespace) == old
    assert replicas(control_plane, namespace) == {old: 2, new: 0}
    assert engines(control_plane, namespace)[old]["metadata"]["uid"] == uid


def test_an_amount_that_is_spelt_another_way_restarts_nothing(control_plane: ControlPlane, namespace: str) -> None:
    name = serve(control_plane, namespace, resources={"cpu": "1", "memory": "2Gi", "sharedMemory": "1Gi"})
    before = pod_uids(control_plane, namespace)
    respelt = {"cpu": "1000m", "memory": "2048Mi", "sharedMemory": "1024Mi"}
    assert deploy(control_plane, namespace, resources=respelt) == name
    wait_until(lambda: run_pass(control_plane, namespace).writes == [], 30, "a pass that has nothing to write")
    assert pod_uids(control_plane, namespace) == before


def pod_uids(control_plane: ControlPlane, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in engine_pods(control_plane, namespace)}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_an_amount_is_canonical_where_the_api_server_stores_it_as_it_is(
    control_plane: ControlPlane, namespace: str, text: str, canonical: str
) -> None:
    metadata = {"name": "amount", "namespace": namespace}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": {"cpu": text}}}
    assert control_plane.apply(quota, dryRun="All")["spec"]["hard"]["cpu"] == canonical


def test_a_revision_that_cannot_start_leaves_what_serves_alone(control_plane: ControlPlane, namespace: str) -> None:
    old = serve(control_plane, namespace)
    new = deploy(control_plane, namespace, engine=NEW)
    label = f"{REVISION_LABEL}={current_revision(control_plane, namespace)}"
    control_plane.mark_pods_waiting(namespace, label, "ErrImagePull", "no such image")
    settle(control_plane, namespace)
    assert replicas(control_plane, namespace) == {old: 2, new: 1}
    assert num_ready(control_plane, namespace) == 2
    assert conditions(get_service(control_plane, namespace))["Progressing"] == ("False", "RolloutHalted")
    control_plane.request("delete", path_of(SERVICE, namespace, old))
    settle(control_plane, namespace)
    assert engines(control_plane, namespace, SERVICE).keys() == {old, new}
    assert num_ready(control_plane, namespace) == 2
    deploy(control_plane, namespace)
    assert replicas(control_plane, namespace) == {old: 2, new: 0}


def test_only_so_many_former_revisions_are_kept(control_plane: ControlPlane, namespace: str) -> None:
    rollout = {"historyLimit": 1}
    names = [
        serve(control_plane, namespace, engine={"device": "cpu", "maxNumSeqs": number}, replicas=1, rollout=rollout)
        for number in (1, 2, 3)
    ]
    settle(control_plane, namespace)
    assert replicas(control_plane, namespace) == {names[1]: 0, names[2]: 1}


def weights(control_plane: ControlPlane, namespace: str) -> dict[str, str | None]:
    services = engines(control_plane, namespace, SERVICE)
    return {name: each["metadata"]["labels"].get(TRAFFIC_WEIGHT) for name, each in services.items()}


def slice_weights(control_plane: ControlPlane, namespace: str) -> set[str | None]:
    """As routers read them."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    items = control_plane.request("get", path, labelSelector=f"{REVISION_LABEL}")["items"]
    return {each["metadata"]["labels"].get(TRAFFIC_WEIGHT) for each in items}


def test_a_canary_waits_at_its_weight_until_it_is_let_go_on(control_plane: ControlPlane, namespace: str) -> None:
    old = serve(control_plane, namespace)
    new = deploy(control_plane, namespace, engine=NEW, rollout={"canary": {"weight": 10}})
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    assert replicas(control_plane, namespace) == {old: 2, new: 1}
    assert weights(control_plane, namespace) == {old: None, new: "10"}
    wait_until(lambda: slice_weights(control_plane, namespace) == {None, "10"}, 30, "the slices' weights")
    assert conditions(get_service(control_plane, namespace))["Progressing"] == ("False", "RolloutPaused")
    serve(control_plane, namespace, engine=NEW, rollout={"canary": {"weight": 10, "pause": False}})
    assert replicas(control_plane, namespace) == {old: 0, new: 2}
    assert weights(control_plane, namespace) == {new: None}
    wait_until(lambda: slice_weights(control_plane, namespace) == {None}, 30, "the slices to have no weight")


def test_a_canary_whose_label_is_taken_away_gets_it_back_and_goes_no_further(
    control_plane: ControlPlane, namespace: str
) -> None:
    old = serve(control_plane, namespace)
    new = deploy(control_plane, namespace, engine=NEW, rollout={"canary": {"weight": 10}})
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    change = {"metadata": {"labels": {TRAFFIC_WEIGHT: None}}}
    control_plane.request("patch", path_of(SERVICE, namespace, new), change, MERGE_PATCH)
    run_pass(control_plane, namespace)
    assert replicas(control_plane, namespace) == {old: 2, new: 1}
    assert weights(control_plane, namespace) == {old: None, new: "10"}


def test_a_canary_whose_annotation_is_taken_away_waits_and_goes_on(control_plane: ControlPlane, namespace: str) -> None:
    old = serve(control_plane, namespace)
    canary: dict[str, Any] = {"weight": 10}
    new = deploy(control_plane, namespace, engine=NEW, rollout={"canary": canary})
    mark_engines_ready(control_plane, namespace)
    change = {"metadata": {"annotations": {TRAFFIC_WEIGHT: None}}}
    control_plane.request("patch", path_of(SERVICE, namespace, new), change, MERGE_PATCH)
    settle(control_plane, namespace)
    assert replicas(control_plane, namespace) == {old: 2, new: 1}
    assert weights(control_plane, namespace) == {old: None, new: "10"}
    serve(control_plane, namespace, engine=NEW, rollout={"canary": {**canary, "pause": False}})
    assert replicas(control_plane, namespace) == {old: 0, new: 2}


def test_a_canary_that_is_given_up_has_no_weight_until_it_comes_back(
    control_plane: ControlPlane, namespace: str
) -> None:
    canary = {"engine": NEW, "rollout": {"canary": {"weight": 50}}}
    old = serve(control_plane, namespace)
    new = deploy(control_plane, namespace, **canary)
    mark_engines_ready(control_plane, namespace)
    settle(control_plane, namespace)
    assert weights(control_plane, namespace) == {old: None, new: "50"}
    control_plane.apply(manifest(namespace))
    run_pass(control_plane, namespace)
    assert weights(control_plane, namespace) == {old: None, new: None}
    control_plane.apply(manifest(namespace, **canary))
    run_pass(control_plane, namespace)
    assert weights(control_plane, namespace) == {old: None, new: "50"}


def test_what_a_deletion_orphaned_is_rolled_and_goes_with_the_next_service(
    control_plane: ControlPlane, namespace: str
) -> None:
    path = path_of(INFERENCE_SERVICE, namespace, NAME)
    control_plane.apply(manifest(namespace))
    roll_out(control_plane, namespace)
    orphan = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan"}
    control_plane.request("delete", path, orphan)
    wait_until(lambda: not control_plane.exists(path), 30, "the service to go")
    control_plane.apply(manifest(namespace, engine={"device": "cpu", "maxNumSeqs": 8}))
    roll_out(control_plane, namespace)
    uid = get_service(control_plane, namespace)["metadata"]["uid"]
    owned = {
        key: [owner["uid"] for owner in child["metadata"].get("ownerReferences", [])]
        for key, child in get_children(control_plane, namespace).items()
        if key.kind != SECRET
    }
    assert [key.kind for key in owned].count(DEPLOYMENT) == 3
    assert set(map(tuple, owned.values())) == {(uid,)}
