"""Passes over a real API server: what they create, put back, roll and delete, and that they write nothing twice."""

from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.dynamic.exceptions import UnprocessibleEntityError

from kvasir_operator.api.parse import parse_service
from kvasir_operator.apply.drift import find_drift
from kvasir_operator.desired.objects import desired_objects
from kvasir_operator.kube.kinds import (
    DEPLOYMENT,
    INFERENCE_SERVICE,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
    SECRET,
    SERVICE,
    Kind,
    KubeObject,
    ObjectKey,
    object_key,
)

from .control_plane import ControlPlane
from .processes import wait_until
from .reconciling import (
    NAME,
    SETTINGS,
    current_engine,
    get_children,
    get_events,
    get_service,
    manifest,
    path_of,
    run_pass,
    settle,
)

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
MERGE_PATCH = "application/merge-patch+json"
BUDGET = f"{NAME}-serve"


def versions(control_plane: ControlPlane, namespace: str) -> dict[str, str]:
    objects = [*get_children(control_plane, namespace).values(), get_service(control_plane, namespace)]
    return {f"{obj['kind']} {obj['metadata']['name']}": obj["metadata"]["resourceVersion"] for obj in objects}


def deploy(control_plane: ControlPlane, namespace: str, **spec: Any) -> None:
    control_plane.apply(manifest(namespace, **spec))
    settle(control_plane, namespace)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_pass_creates_exactly_what_render_prints(control_plane: ControlPlane, namespace: str, example: Path) -> None:
    for written in yaml.safe_load_all(example.read_text()):
        written["metadata"]["namespace"] = namespace
        stored = control_plane.apply(written)
        run_pass(control_plane, namespace, stored["metadata"]["name"])
        rendered = {object_key(obj): obj for obj in desired_objects(parse_service(written), SETTINGS)}
        live = get_children(control_plane, namespace, stored["metadata"]["name"])
        assert live.keys() == rendered.keys()
        assert [path for key, obj in rendered.items() for path in find_drift(obj, live[key])] == []


def test_every_child_is_owned_by_its_service(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    uid = get_service(control_plane, namespace)["metadata"]["uid"]
    owners = [child["metadata"]["ownerReferences"] for child in get_children(control_plane, namespace).values()]
    assert {(each["uid"], each["controller"]) for (each,) in owners} == {(uid, True)}


def test_a_second_pass_writes_nothing(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    before, sent = versions(control_plane, namespace), len(control_plane.writes(namespace=namespace))
    assert run_pass(control_plane, namespace).writes == []
    assert versions(control_plane, namespace) == before
    assert len(control_plane.writes(namespace=namespace)) == sent


def test_a_services_secret_is_random_and_kept_through_a_change_of_the_service(
    control_plane: ControlPlane, namespace: str
) -> None:
    def secret() -> KubeObject:
        return get_children(control_plane, namespace)[ObjectKey(SECRET, f"{NAME}-router")]

    deploy(control_plane, namespace)
    made = secret()
    deploy(control_plane, namespace, engine={"device": "cpu", "maxNumSeqs": 8})
    [value] = made["data"].values()
    assert len(b64decode(value)) >= 43
    assert secret() == made


def test_nobody_can_change_a_services_secret(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    path = path_of(SECRET, namespace, f"{NAME}-router")
    with pytest.raises(UnprocessibleEntityError, match="field is immutable when `immutable` is set"):
        control_plane.request("patch", path, {"data": {"secret": ""}}, MERGE_PATCH)


@pytest.mark.parametrize(
    "kind", [DEPLOYMENT, SERVICE, ROLE_BINDING, SECRET, POD_DISRUPTION_BUDGET], ids=lambda kind: str(kind.kind)
)
def test_a_deleted_child_is_put_back(control_plane: ControlPlane, namespace: str, kind: Kind) -> None:
    deploy(control_plane, namespace)
    name = f"{NAME}-router"
    control_plane.request("delete", path_of(kind, namespace, name))
    wait_until(lambda: ObjectKey(kind, name) not in get_children(control_plane, namespace), 10, f"{kind.kind} to go")
    run_pass(control_plane, namespace)
    assert ObjectKey(kind, name) in get_children(control_plane, namespace)


EDITS: list[tuple[Kind, KubeObject, str]] = [
    (DEPLOYMENT, {"spec": {"replicas": 7}}, "spec.replicas"),
    (DEPLOYMENT, {"spec": {"progressDeadlineSeconds": 5}}, "spec.progressDeadlineSeconds"),
    (DEPLOYMENT, {"metadata": {"labels": {"serving.kvasir.dev/service": None}}}, "metadata.labels"),
    (SERVICE, {"spec": {"selector": {"app": "evil", "serving.kvasir.dev/role": "x"}}}, "spec.selector"),
    (POD_DISRUPTION_BUDGET, {"spec": {"maxUnavailable": None, "minAvailable": 0}}, "spec.maxUnavailable"),
]


@pytest.mark.parametrize(("kind", "edit", "path"), EDITS, ids=[path for _, _, path in EDITS])
def test_an_edited_child_is_put_back(
    control_plane: ControlPlane, namespace: str, kind: Kind, edit: KubeObject, path: str
) -> None:
    deploy(control_plane, namespace)
    name = BUDGET if kind == POD_DISRUPTION_BUDGET else current_engine(control_plane, namespace)
    before = get_children(control_plane, namespace)[ObjectKey(kind, name)]
    control_plane.request("patch", path_of(kind, namespace, name), edit, MERGE_PATCH, fieldManager="hand")
    assert (("apply", kind.kind)) in run_pass(control_plane, namespace).writes
    after = get_children(control_plane, namespace)[ObjectKey(kind, name)]
    assert find_drift({"labels": before["metadata"]["labels"], "spec": before["spec"]},
                      {"labels": after["metadata"]["labels"], "spec": after["spec"]}) == []  # fmt: skip
    ((reason, message),) = [event for event in get_events(control_plane, namespace) if event[0] != "Created"]
    assert reason == "Restored"
    assert path in message


def test_what_others_add_to_a_child_is_left_alone(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    theirs = {"metadata": {"annotations": {"example.com/note": "x"}, "labels": {"team": "search"}}}
    name = current_engine(control_plane, namespace)
    control_plane.request("patch", path_of(SERVICE, namespace, name), theirs, MERGE_PATCH)
    assert run_pass(control_plane, namespace).writes == []
    metadata = get_children(control_plane, namespace)[ObjectKey(SERVICE, name)]["metadata"]
    assert metadata["annotations"]["example.com/note"] == "x"


def test_a_field_that_is_no_longer_wanted_is_taken_away(control_plane: ControlPlane, namespace: str) -> None:
    router, key = {"replicas": 2}, ObjectKey(DEPLOYMENT, f"{NAME}-router")
    deploy(control_plane, namespace, router={**router, "pod": {"nodeSelector": {"disk": "fast"}}})
    assert "nodeSelector" in get_children(control_plane, namespace)[key]["spec"]["template"]["spec"]
    deploy(control_plane, namespace, router=router)
    assert "disk" not in get_children(control_plane, namespace)[key]["spec"]["template"]["spec"].get("nodeSelector", {})


def test_a_child_that_is_no_longer_wanted_is_deleted(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    assert ObjectKey(POD_DISRUPTION_BUDGET, BUDGET) in get_children(control_plane, namespace)
    control_plane.apply(manifest(namespace, replicas=1))
    assert ("delete", "PodDisruptionBudget") in run_pass(control_plane, namespace).writes
    assert ObjectKey(POD_DISRUPTION_BUDGET, BUDGET) not in get_children(control_plane, namespace)


def test_routers_keep_their_rights_when_the_operator_is_given_namespaces_of_its_own(
    control_plane: ControlPlane, namespace: str
) -> None:
    """Where it serves single namespaces the rights are a Role's, and nobody can change what a RoleBinding binds to."""
    deploy(control_plane, namespace)
    binding, moved = ObjectKey(ROLE_BINDING, f"{NAME}-router"), replace(SETTINGS, namespace=(namespace,))
    assert get_children(control_plane, namespace)[binding]["roleRef"]["kind"] == "ClusterRole"
    run_pass(control_plane, namespace, settings=moved)
    assert get_children(control_plane, namespace)[binding]["roleRef"]["kind"] == "Role"
    assert run_pass(control_plane, namespace, settings=moved).writes == []


def test_deleting_a_service_takes_all_its_children_along(control_plane: ControlPlane, namespace: str) -> None:
    deploy(control_plane, namespace)
    control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
    outcome = run_pass(control_plane, namespace).outcome
    assert outcome is not None
    assert outcome.is_gone
    wait_until(lambda: not get_children(control_plane, namespace), 30, "the children to be garbage collected")


def test_a_service_made_anew_under_its_old_name_waits_for_the_old_children_to_go(
    control_plane: ControlPlane, namespace: str
) -> None:
    deploy(control_plane, namespace)
    control_plane.request("delete", path_of(INFERENCE_SERVICE, namespace, NAME))
    uid = control_plane.apply(manifest(namespace))["metadata"]["uid"]

    def all_new() -> bool:
        outcome = run_pass(control_plane, namespace).outcome
        return outcome is not None and outcome.retry_seconds is None

    wait_until(all_new, 30, "the children of the new service")
    owners = [
        child["metadata"]["ownerReferences"][0]["uid"] for child in get_children(control_plane, namespace).values()
    ]
    assert set(owners) == {uid}
