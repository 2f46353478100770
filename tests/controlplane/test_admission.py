"""Admission that fails, denies or changes children: a pass ends in a status that says so, and nothing is fought."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes.dynamic.exceptions import DynamicApiError

from kvasir_operator.api.labels import ROLE_LABEL, ROLE_SERVE
from kvasir_operator.errors import ChildrenRefusedError
from kvasir_operator.kube.kinds import DEPLOYMENT, SERVICE, KubeObject, object_key

from .control_plane import ControlPlane
from .operator_process import forked_operator
from .processes import wait_until
from .reconciling import conditions, get_children, get_service, manifest, path_of, run_pass

API = "admissionregistration.k8s.io/v1"
DEPLOYMENTS = {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["deployments"]}
MIRROR = "mirror.example.com"


def only_in(namespace: str) -> KubeObject:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def dead_webhook(namespace: str) -> list[KubeObject]:
    """Nothing listens where it is called."""
    webhook = {
        "name": "policy.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/"},
        "rules": [{**DEPLOYMENTS, "operations": ["CREATE"]}],
        "namespaceSelector": only_in(namespace),
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return [configuration("ValidatingWebhookConfiguration", namespace, webhooks=[webhook])]


def denying_policy(namespace: str) -> list[KubeObject]:
    return policy("Validating", namespace, ["CREATE"], validations=[{"expression": "false", "message": "not here"}])


def mirroring_policy(namespace: str) -> list[KubeObject]:
    """Takes the images of Deployments from a mirror, as registries' policies do."""
    image = "object.spec.template.spec.containers[0].image"
    patch = f'JSONPatch{{op: "replace", path: "/spec/template/spec/containers/0/image", value: "{MIRROR}/" + {image}}}'
    expression = f'{image}.startsWith("{MIRROR}/") ? [] : [{patch}]'
    mutation = {"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}
    fields = {"mutations": [mutation], "reinvocationPolicy": "Never", "failurePolicy": "Fail"}
    return policy("Mutating", namespace, ["CREATE", "UPDATE"], **fields)


def policy(kind: str, namespace: str, operations: list[str], **spec: Any) -> list[KubeObject]:
    rules = [{**DEPLOYMENTS, "operations": operations}]
    constraints = {"namespaceSelector": only_in(namespace), "resourceRules": rules}
    binding = {"policyName": namespace, **({"validationActions": ["Deny"]} if kind == "Validating" else {})}
    return [
        configuration(f"{kind}AdmissionPolicy", namespace, spec={"matchConstraints": constraints, **spec}),
        configuration(f"{kind}AdmissionPolicyBinding", namespace, spec=binding),
    ]


def configuration(kind: str, name: str, **fields: Any) -> KubeObject:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, **fields}


@contextmanager
def admitting(control_plane: ControlPlane, objects: list[KubeObject], is_active: Callable[[], bool]) -> Iterator[None]:
    for obj in objects:
        control_plane.apply(obj)
    try:
        wait_until(is_active, 60, f"{objects[0]['kind']} to take effect")
        yield
    finally:
        for obj in objects:
            kind = control_plane.dynamic.resources.get(api_version=API, kind=obj["kind"])
            control_plane.request("delete", kind.path(name=obj["metadata"]["name"]))
        wait_until(lambda: not is_active(), 60, f"{objects[0]['kind']} to be over")


def tried_deployment(control_plane: ControlPlane, namespace: str) -> KubeObject:
    """What a new Deployment would be stored as; raises DynamicApiError where it is denied."""
    labels = {"app": "probe"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    spec = {"selector": {"matchLabels": labels}, "template": pod}
    metadata = {"name": "probe", "namespace": namespace}
    obj = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    return control_plane.request("post", path_of(DEPLOYMENT, namespace), obj, dryRun="All")


def is_denied(control_plane: ControlPlane, namespace: str) -> bool:
    try:
        tried_deployment(control_plane, namespace)
    except DynamicApiError:
        return True
    return False


def engine_image(control_plane: ControlPlane, namespace: str) -> str:
    [engine] = [
        child
        for key, child in get_children(control_plane, namespace).items()
        if key.kind == DEPLOYMENT and child["metadata"]["labels"][ROLE_LABEL] == ROLE_SERVE
    ]
    return str(engine["spec"]["template"]["spec"]["containers"][0]["image"])


@pytest.mark.parametrize(
    ("objects", "name"),
    [(dead_webhook, 'failed calling webhook "policy.example.com"'), (denying_policy, "ValidatingAdmissionPolicy")],
)
def test_admission_that_refuses_a_child_is_named_in_the_status_and_holds_up_no_other(
    objects: Callable[[str], list[KubeObject]], name: str, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace))
    with admitting(control_plane, objects(namespace), lambda: is_denied(control_plane, namespace)):
        with pytest.raises(ChildrenRefusedError, match=name):
            run_pass(control_plane, namespace)
        service = get_service(control_plane, namespace)
        assert conditions(service)["Degraded"] == ("True", "AdmissionFailed")
        [message] = [each["message"] for each in service["status"]["conditions"] if each["type"] == "Degraded"]
        assert "Deployment llama-router: " in message
        assert name in message
        kinds = {key.kind for key in get_children(control_plane, namespace)}
        assert (SERVICE in kinds, DEPLOYMENT in kinds) == (True, False)
    run_pass(control_plane, namespace)
    assert DEPLOYMENT in {object_key(child).kind for child in get_children(control_plane, namespace).values()}


@pytest.mark.parametrize(
    "pod",
    [
        {"affinity": {"nodeAffinty": {}}},
        {"securityContext": {"runAsUser": "root"}},
    ],
    ids=["a field that no schema knows", "a wrong type"],
)
def test_a_child_that_the_api_server_answers_with_500_is_named_in_the_status_and_holds_up_no_other(
    pod: KubeObject, control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.apply(manifest(namespace, replicas=1))
    run_pass(control_plane, namespace)
    control_plane.apply(manifest(namespace, replicas=2, pod=pod))
    with pytest.raises(ChildrenRefusedError, match="typed patch"):
        run_pass(control_plane, namespace)
    service = get_service(control_plane, namespace)
    assert service["status"]["observedGeneration"] == service["metadata"]["generation"]
    assert conditions(service)["Degraded"] == ("True", "ApplyFailed")
    control_plane.apply(manifest(namespace, replicas=2))
    run_pass(control_plane, namespace)
    assert conditions(get_service(control_plane, namespace))["Degraded"][0] == "False"


def test_what_a_mutating_policy_changes_is_not_fought_by_this_operator_or_the_next(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def is_mirrored() -> bool:
        pod = tried_deployment(control_plane, namespace)["spec"]["template"]["spec"]
        return bool(pod["containers"][0]["image"] == f"{MIRROR}/a")

    with admitting(control_plane, mirroring_policy(namespace), is_mirrored):
        control_plane.apply(manifest(namespace))
        run_pass(control_plane, namespace)
        assert engine_image(control_plane, namespace).startswith(f"{MIRROR}/")
        assert ("apply", "Deployment") not in run_pass(control_plane, namespace).writes  # remembers nothing: a dry run
        flags = (f"--namespace={namespace}", "--resync-seconds=1")
        with forked_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
            operator.wait_until_ready()
            passes = [operator.passes()]
            wait_until(lambda: operator.passes() >= passes[0] + 5, 40, "five passes more")
            control_plane.apply(manifest(namespace, replicas=3))
            wait_until(lambda: operator.passes() >= passes[0] + 10, 40, "passes after a change")
        assert engine_image(control_plane, namespace).startswith(f"{MIRROR}/")
    events = control_plane.request("get", f"/api/v1/namespaces/{namespace}/events")["items"]
    assert "Restored" not in {each["reason"] for each in events}


def test_a_controller_that_writes_back_is_named_and_met_ever_more_seldom(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    control_plane.apply(manifest(namespace))
    flags = (f"--namespace={namespace}",)
    with forked_operator(control_plane.operator_kubeconfig, tmp_path / "log", *flags) as operator:
        wait_until(lambda: len(conditions_or_none(control_plane, namespace)) > 0, 40, "the first status")
        path = path_of(DEPLOYMENT, namespace, "llama-router")
        edit = {"spec": {"minReadySeconds": 77, "revisionHistoryLimit": 9}}

        def is_contested() -> bool:
            if control_plane.request("get", path)["spec"]["revisionHistoryLimit"] != 9:
                control_plane.request("patch", path, edit, "application/merge-patch+json", fieldManager="meddler")
            return conditions_or_none(control_plane, namespace).get("Degraded") == ("True", "FieldsContested")

        before = operator.writes("apply", "Deployment")
        wait_until(is_contested, 60, "the condition")
        assert 3 <= operator.writes("apply", "Deployment") - before <= 5  # at 0, 1, 3 and 7 s
    [message] = [
        each["message"]
        for each in get_service(control_plane, namespace)["status"]["conditions"]
        if each["type"] == "Degraded"
    ]
    assert "Deployment llama-router: meddler keeps writing spec.revisionHistoryLimit" in message


def conditions_or_none(control_plane: ControlPlane, namespace: str) -> dict[str, tuple[str, str]]:
    service = get_service(control_plane, namespace)
    return conditions(service) if "conditions" in service.get("status", {}) else {}
